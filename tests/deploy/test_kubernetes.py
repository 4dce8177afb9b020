"""The manifests and the Helm chart agree with the server and with Kubernetes' own schemas.

Helm's engine (helm-python-sdk) renders the chart, and the published schemas of a Kubernetes version
(kubernetes-validate) check every object that is Kubernetes' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from serve.cli.run_settings import CONFIG_ENV, ENV_PREFIX, SETTINGS
from serve.config import EngineConfig
from serve.http.edge.settings import HttpSettings
from serve.http.monitoring.health import LIVE, READY
from serve.http.monitoring.metric_table import SECTIONS
from tests.deploy.manifests import CHART, KUBERNETES, Object, pods_of, rendered, static

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"apiKey": {"existingSecret": "keys"}},
    "all": {
        "apiKey": {"value": "k" * 20},
        "autoscaling": {"enabled": True},
        "podMonitor": {"enabled": True},
        "settings": {"max_num_seqs": 64, "order": "fair", "kv_cache_bytes": "8GiB"},
        "cache": {"existingClaim": "cache"},
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "llm", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
    },
    "bare": {
        "apiKey": {"existingSecret": "keys"},
        "kvEvents": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "disruptionBudget": {"enabled": False},
        "sharePrefixes": False,
    },
    "group": {
        "apiKey": {"existingSecret": "keys"},
        "tensorParallelSize": 2,
        "pipelineParallelSize": 2,
        "groupKeySecret": "group",
        "podMonitor": {"enabled": True},
    },
}
SETS = ["static", *VARIANTS]


def objects_of(name: str) -> list[Object]:
    return static() if name == "static" else rendered(VARIANTS[name])


@pytest.fixture(params=SETS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return objects_of(request.param)


def kind(objects: list[Object], name: str) -> Iterator[Object]:
    return (each for each in objects if each["kind"] == name)


def test_kubernetes_takes_every_object(objects: list[Object]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    version = schemas.latest_version()
    checked = set()
    for each in objects:
        for one in [each] if "x-k8s" not in each["apiVersion"] else pods_of(each):
            if one["apiVersion"].partition("/")[0] not in ("monitoring.coreos.com",):
                schemas.validate(one, version, strict=True)
                checked.add(one["kind"])
    assert checked & {"Deployment", "Pod"} and "Service" in checked


def test_a_wrong_object_is_refused() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    (deployment,) = kind(static(), "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(schemas.utils.ValidationError):
        schemas.validate(deployment, schemas.latest_version(), strict=True)


def test_every_variable_is_a_setting_with_a_value_that_is_taken(objects: list[Object]) -> None:
    known = {setting.env: setting for setting in SETTINGS.values()}
    for pod in (pod for each in objects for pod in pods_of(each)):
        values: dict[type, dict[str, Any]] = {EngineConfig: {}, HttpSettings: {}}
        (container,) = pod["spec"]["containers"]
        names = [item["name"] for item in container["env"]]
        assert len(set(names)) == len(names)
        for item in container["env"]:
            if not item["name"].startswith(ENV_PREFIX) or item["name"] == CONFIG_ENV:
                continue
            if item["name"] == "MERGESTEP_API_KEY":
                assert set(item["valueFrom"]) == {"secretKeyRef"}, "no key in a manifest"
                continue
            setting, text = known[item["name"]], item["value"]
            assert isinstance(text, str), "Kubernetes takes no numbers here"
            if setting.kind in ("text", "integer", "boolean") and setting.name != "model":
                made = {"integer": int, "boolean": lambda t: t == "true"}.get(setting.kind, str)
                values[setting.owner][setting.name] = made(text)
        EngineConfig.from_settings(None, **values[EngineConfig])
        HttpSettings(**{"api_keys": ("k" * 20,), **values[HttpSettings]})


def test_probes_ask_for_what_the_server_has(objects: list[Object]) -> None:
    served = 0
    for pod in (pod for each in objects for pod in pods_of(each)):
        (container,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        assert len(set(ports.values())) == len(ports)
        if "http" not in ports:  # a rank that does not serve
            assert not any(name.endswith("Probe") for name in container)
            continue
        served += 1
        for name, paths in {"startup": LIVE, "liveness": LIVE, "readiness": READY}.items():
            probe = container[f"{name}Probe"]["httpGet"]
            assert probe["path"] in paths and probe["port"] == "http"
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert int(env.get("MERGESTEP_PORT", "8000")) == ports["http"]
        if "MERGESTEP_KV_EVENTS" in env:
            port = int(env["MERGESTEP_KV_EVENTS"].rpartition(":")[2])
            assert (ports["kv-events"], ports["kv-replay"]) == (port, port + 1)
            assert re.fullmatch(r"kv@\$\(POD_IP\):\d+@[^@]+", env["MERGESTEP_KV_EVENTS_TOPIC"])
            assert env["MERGESTEP_SHARE_PREFIXES"] in ("true", "false")
            listed = [item["name"] for item in container["env"]]
            assert listed.index("POD_IP") < listed.index("MERGESTEP_KV_EVENTS_TOPIC"), "$(POD_IP)"
    assert served


def test_a_pod_has_time_to_drain(objects: list[Object]) -> None:
    for pod in (pod for each in objects for pod in pods_of(each)):
        (container,) = pod["spec"]["containers"]
        env = {item["name"]: item.get("value") for item in container["env"]}
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        needed_s = pause_s + float(env["MERGESTEP_DRAIN_S"])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s + 10


def test_a_pod_may_do_little(objects: list[Object]) -> None:
    (user,) = re.findall(r"--uid (\d+)", (KUBERNETES.parent / "Dockerfile").read_text())
    for pod in (pod for each in objects for pod in pods_of(each)):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == int(user)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == volumes
        assert mounts["cache"] == "/var/cache/mergestep" and mounts["tmp"] == "/tmp"


def test_selectors_find_the_pods_that_serve(objects: list[Object]) -> None:
    serving = [
        pod["metadata"]["labels"]
        for each in objects
        for pod in pods_of(each)
        if pod["spec"]["containers"][0].get("ports")
    ]
    others = [
        pod["metadata"]["labels"]
        for each in objects
        for pod in pods_of(each)
        if not pod["spec"]["containers"][0].get("ports")
    ]

    def found(selector: dict[str, str], pods: list[dict[str, str]]) -> int:
        return sum(selector.items() <= labels.items() for labels in pods)

    services = list(kind(objects, "Service"))
    assert services
    for service in services:
        assert found(service["spec"]["selector"], serving) == 1
        assert found(service["spec"]["selector"], others) == 0
        assert {port["targetPort"] for port in service["spec"]["ports"]} == {"http"}
    for name in ("PodDisruptionBudget", "PodMonitor"):
        for each in kind(objects, name):
            assert found(each["spec"]["selector"]["matchLabels"], serving) == 1
    for each in kind(objects, "NetworkPolicy"):
        assert found(each["spec"]["podSelector"]["matchLabels"], serving) == 1
        rules = each["spec"]["ingress"]
        open_ports = {
            port["port"] for rule in rules if "from" not in rule for port in rule["ports"]
        }
        assert open_ports == {"http"}, "events have the tokens of prompts"
    for each in kind(objects, "Deployment"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", ["static", "all"])
def test_the_autoscaler_reads_metrics_of_the_server(name: str) -> None:
    objects = objects_of(name)
    rules = yaml.safe_load((KUBERNETES / "adapter-rules.yaml").read_text())["rules"]["custom"]
    made = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in rules}
    served = {f"mergestep:{spec.name}" for specs in SECTIONS.values() for spec in specs}
    assert set(made.values()) <= served
    (scaler,) = kind(objects, "HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == set(made)
    target = scaler["spec"]["scaleTargetRef"]
    (deployment,) = kind(objects, "Deployment")
    assert target["name"] == deployment["metadata"]["name"]
    if name != "static":
        assert "replicas" not in deployment["spec"], "the autoscaler has them"


def test_a_groups_size_is_the_number_of_its_ranks() -> None:
    for objects in (static(), rendered(VARIANTS["group"])):
        (group,) = kind(objects, "LeaderWorkerSet")
        template = group["spec"]["leaderWorkerTemplate"]
        for pod in pods_of(group):
            env = {it["name"]: it.get("value") for it in pod["spec"]["containers"][0]["env"]}
            sizes = (env.get(f"MERGESTEP_{n}_PARALLEL_SIZE", "1") for n in ("TENSOR", "PIPELINE"))
            assert int(next(sizes)) * int(next(sizes)) == template["size"] > 1
            assert env["MERGESTEP_GROUP_KEY_FILE"] == "/key/key"
        assert template["restartPolicy"] == "None"
        (worker,) = [pod for pod in pods_of(group) if not pod["spec"]["containers"][0].get("ports")]
        env = {it["name"]: it.get("value") for it in worker["spec"]["containers"][0]["env"]}
        assert env["MERGESTEP_HOST"] == "127.0.0.1" and "MERGESTEP_API_KEY" not in env


# ---- the chart itself


def test_helm_lints_the_chart() -> None:
    helm = pytest.importorskip("helm_python")
    for values in VARIANTS.values():
        found = helm.lint(str(CHART), values=values, strict=True)
        assert not found["errors"], found
        assert all("icon" in message["error"] for message in found["messages"]), found


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "apiKey: name a Secret"),
        ({"apiKey": {"value": "k"}, "modle": "x"}, "modle"),
        ({"apiKey": {"value": "k"}, "drainSeconds": "x"}, "drainSeconds"),
        ({"apiKey": {"value": "k"}, "settings": {"max-num": 1}}, "max-num"),
        ({"apiKey": {"value": "k"}, "pipelineParallelSize": 2}, "groupKeySecret"),
        (VARIANTS["group"] | {"autoscaling": {"enabled": True}}, "autoscaling: not for a model"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], problem: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=problem):
        rendered(values)


def test_the_chart_has_the_projects_version_and_documents_its_values() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (KUBERNETES.parent.parent / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, flags=re.M)
    assert about["appVersion"] == version
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())) == set(schema) - {"global"}


def test_two_releases_do_not_share_pods() -> None:
    one, two = (rendered(VARIANTS["plain"], name) for name in ("a", "b"))
    (service,) = kind(one, "Service")
    (deployment,) = kind(two, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= labels.items()
