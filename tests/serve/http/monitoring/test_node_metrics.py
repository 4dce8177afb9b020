"""/metrics of memory nodes."""

from __future__ import annotations

from types import SimpleNamespace

from serve.http.monitoring.metric_table import ELSEWHERE


def test_each_node_has_one_state():
    [spec] = [spec for spec in ELSEWHERE if spec.name == "memory_node_state"]
    states = {"tcp://a:1": "healthy", "tcp://b:1": "probation"}
    sources = SimpleNamespace(stats=SimpleNamespace(memory_node_states=states))
    values = dict(spec.value(sources))
    assert values == {("tcp://a:1", "healthy"): 1, ("tcp://b:1", "probation"): 1}
    assert spec.labels == ("node", "state")


def test_each_node_has_one_way_for_rows():
    [spec] = [spec for spec in ELSEWHERE if spec.name == "memory_node_rows"]
    ways = {"rdma://a:1": "lane", "tcp://b:1": "endpoint: the node is not connected by rdma://"}
    sources = SimpleNamespace(stats=SimpleNamespace(memory_node_rows=ways))
    assert dict(spec.value(sources)) == {("rdma://a:1", "lane"): 1, ("tcp://b:1", "endpoint"): 1}
    assert spec.labels == ("node", "by")
