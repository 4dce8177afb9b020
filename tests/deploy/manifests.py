"""Reads the Kubernetes objects of deploy/: the manifests, and what Helm makes of the chart."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.source_tree import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "mergestep"
_NO_OBJECTS = {"kustomization.yaml", "adapter-rules.yaml"}

Object = dict[str, Any]


def static() -> list[Object]:
    """Returns the objects of all manifests, of which kustomization.yaml names some."""
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert all((KUBERNETES / name).is_file() for name in listed)
    files = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name not in _NO_OBJECTS)
    return [each for path in files for each in yaml.safe_load_all(path.read_text())]


def rendered(values: Object, name: str = "demo") -> list[Object]:
    """Returns the objects of a release. HelmError for values that the chart refuses."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        texts = chart.render(values=values, name=name, namespace="ns")
    return [
        each
        for path, text in texts.items()
        if path.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each
    ]


def pods_of(each: Object) -> list[Object]:
    """Returns the pods that an object makes, as objects of their own."""
    templates: list[Object] = []
    if each["kind"] == "Deployment":
        templates = [each["spec"]["template"]]
    elif each["kind"] == "LeaderWorkerSet":
        inner = each["spec"]["leaderWorkerTemplate"]
        templates = [inner["leaderTemplate"], inner["workerTemplate"]]
    return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]
