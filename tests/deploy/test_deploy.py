"""The files of deploy/ agree with the project: what images hold, who runs the server, health."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from serve.cli.run_settings import CONFIG_ENV, ENV_PREFIX, SETTINGS
from serve.http.edge.settings import HttpSettings
from serve.http.monitoring.health import LIVE
from tests.support.source_tree import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile", "Dockerfile.cuda")
COMPILERS = {"g++", "gcc", "clang", "cmake", "ninja-build", "build-essential"}
STOP_S = 10.0
"""How long `docker stop` waits before it kills."""

Stage = list[tuple[str, str]]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages(name: str) -> list[Stage]:
    """Returns the stages of a Dockerfile: instructions in capitals with their arguments."""
    lines = (DEPLOY / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, given = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        if word:
            found[-1].append((word, " ".join(given.split())))
    return found


def given(stage: Stage, instruction: str) -> list[str]:
    return [arguments for word, arguments in stage if word == instruction]


def variables(stage: Stage) -> dict[str, str]:
    pairs = (pair.partition("=") for line in given(stage, "ENV") for pair in line.split())
    return {name: value for name, _, value in pairs}


def packages(stage: Stage) -> set[str]:
    """Returns the Debian packages that a stage installs."""
    found = re.findall(r"apt-get install (.*?)&&", " ".join(given(stage, "RUN")))
    return {word for words in found for word in words.split() if not word.startswith("-")}


def torch_requirement() -> str:
    (found,) = (r for r in project()["project"]["dependencies"] if r.startswith("torch"))
    return str(found)


def check_variables(names: set[str]) -> None:
    """Each MERGESTEP_* is a setting, or one of the two that are read elsewhere."""
    known = {setting.env for setting in SETTINGS.values()} | {CONFIG_ENV, "MERGESTEP_API_KEY"}
    assert {name for name in names if name.startswith(ENV_PREFIX)} - known == set()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_the_server_as_an_ordinary_user(image: str) -> None:
    last = stages(image)[-1]
    words = [word for word, _ in last]
    (user,) = given(last, "USER")
    assert re.search(rf"useradd .*--uid [1-9]\d* .*\b{user}\b", " ".join(given(last, "RUN")))
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    (entry,) = given(last, "ENTRYPOINT")
    init, _, command = json.loads(entry)
    assert init in packages(last)
    assert command in project()["project"]["scripts"]
    (first,) = json.loads(given(last, "CMD")[0])
    assert first == "run"
    (folder,) = given(last, "VOLUME")
    values = variables(last)
    check_variables(set(values))
    assert values["XDG_CACHE_HOME"] == folder and values["HF_HOME"].startswith(f"{folder}/")
    assert given(last, "EXPOSE") == [values["MERGESTEP_PORT"]]
    assert float(values["MERGESTEP_DRAIN_S"]) < STOP_S


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    plain, cuda = (packages(stages(image)[-1]) for image in IMAGES)
    assert "python3" in plain and not plain & COMPILERS
    assert cuda - plain == {"gcc", "libc6-dev", "python3-dev"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_built_from_what_the_wheel_needs(image: str) -> None:
    first = stages(image)[0]
    copied = {name for line in given(first, "COPY") for name in line.split()[:-1]}
    scikit = project()["tool"]["scikit-build"]
    files = {"pyproject.toml", "CMakeLists.txt", project()["project"]["readme"], "LICENSE"}
    assert copied == files | set(scikit["wheel"]["packages"])
    assert all((ROOT / name).exists() for name in copied)
    ignored = (DEPLOY / f"{image}.dockerignore").read_text().split("\n")
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert rules[0] == "*"
    library = PurePosixPath("ops/_native.cpython-311-x86_64-linux-gnu.so")
    last_rules = rules[max(i for i, rule in enumerate(rules) if rule.startswith("!")) + 1 :]
    assert any(fnmatch(str(library), rule) for rule in last_rules)


def test_every_image_and_wheel_has_the_same_torch() -> None:
    for image in IMAGES:
        assert f"'{torch_requirement()}'" in " ".join(given(stages(image)[0], "RUN")), image
    assert f"'{torch_requirement()}'" in project()["tool"]["cibuildwheel"]["before-test"]


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_asks_the_server(image: str) -> None:
    last = stages(image)[-1]
    (check,) = given(last, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python3"
    with answering(200) as (port, asked):
        assert run_check(command, port) == 0
    assert set(asked) <= set(LIVE) and asked
    with answering(503) as (port, _):
        assert run_check(command, port) == 1


def run_check(command: list[str], port: int) -> int:
    env = {"MERGESTEP_PORT": str(port)}
    done = subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True, timeout=30)
    return done.returncode


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """Answers each GET with status; yields the port, and the list of paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_compose_builds_the_images_and_shows_the_port_to_this_machine_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    version = project()["project"]["version"]
    built = {}
    for name, service in services.items():
        assert service["image"].partition(":")[2].partition("-")[0] == version, name
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        built[service["build"]["dockerfile"]] = service
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        values = service["environment"]
        check_variables(set(values))
        assert ":?" in values["MERGESTEP_API_KEY"]
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert float(values["MERGESTEP_DRAIN_S"]) < grace_s
        (folder,) = given(stages("Dockerfile")[-1], "VOLUME")
        assert service["volumes"] == [f"cache:{folder}"]
    assert set(built) == {f"deploy/{image}" for image in IMAGES}


def unit() -> dict[str, list[str]]:
    """Returns the values of each key of the systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "mergestep.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_stops_after_requests_and_stays_down_after_a_wrong_setting() -> None:
    service = unit()
    (start,) = service["ExecStart"]
    command, subcommand, *_ = start.split()
    assert command.rpartition("/")[2] in project()["project"]["scripts"] and subcommand == "run"
    assert service["User"] == ["mergestep"]
    assert service["RestartPreventExitStatus"] == ["2"]
    assert float(service["TimeoutStopSec"][0]) > HttpSettings().drain_s
    (folder,) = service["CacheDirectory"]
    for pair in service["Environment"][0].split():
        name, _, value = pair.partition("=")
        assert name == "PYTHONUNBUFFERED" or value.startswith(f"/var/cache/{folder}")
    check_variables({pair.partition("=")[0] for pair in service["Environment"][0].split()})


def test_the_docs_name_every_file() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    files = {f.name for f in DEPLOY.iterdir() if f.is_file() and f.suffix != ".dockerignore"}
    assert {name for name in files if f"deploy/{name}" not in page} == set()
