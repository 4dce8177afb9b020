"""The router's choice, the scaling policy and what replicas tell, without Ray."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from serve.cluster.ray_serve.app import call_of, split_args
from serve.cluster.ray_serve.choice import BLOCK_TOKENS, PredictedChoice, ReplicaStats
from serve.cluster.ray_serve.policy import QUEUE, QueuePolicy
from serve.cluster.ray_serve.server_replica import as_toml, kept_headers, stats_of
from serve.errors import ConfigError


def names(word: str, number: int) -> list[bytes]:
    return [f"{word}{each}".encode() for each in range(number)]


IDLE = ReplicaStats(1, 0.0, 0.1)


def test_the_shortest_wait_is_chosen_without_a_prefix() -> None:
    choice = PredictedChoice()
    stats = {"a": ReplicaStats(1, 2.0, 0.1), "b": ReplicaStats(1, 0.5, 0.1)}
    assert choice.rank(stats, names("x", 3)) == ["b", "a"]


def test_equal_replicas_take_turns() -> None:
    choice, stats = PredictedChoice(), {"a": IDLE, "b": IDLE, "c": IDLE}
    got = []
    for _ in range(6):
        got.append(choice.rank(stats, [])[0])
        choice.sent(got[-1], IDLE, [])
    assert sorted(got[:3]) == sorted(got[3:]) == ["a", "b", "c"]


def test_a_prefix_draws_a_call_until_the_wait_is_longer_than_its_blocks_take() -> None:
    choice, prompt = PredictedChoice(), names("x", 10)
    choice.sent("b", IDLE, prompt)
    for queue_s, expected in ((0.0, "b"), (0.9, "b"), (1.1, "a")):
        stats = {"a": ReplicaStats(2, 0.0, 0.1), "b": ReplicaStats(2, queue_s, 0.1)}
        assert choice.rank(stats, prompt)[0] == expected, queue_s


def test_a_replica_that_pulls_blocks_is_not_far_behind_one_that_has_them() -> None:
    choice, prompt = PredictedChoice(), names("x", 10)
    choice.sent("b", IDLE, prompt)
    busy = ReplicaStats(2, 0.5, 0.1)
    assert choice.rank({"a": ReplicaStats(2, 0.0, 0.1), "b": busy}, prompt)[0] == "b"
    assert choice.rank({"a": ReplicaStats(2, 0.0, 0.1, 0.01), "b": busy}, prompt)[0] == "a"
    slow = ReplicaStats(2, 0.0, 0.1, 5.0)  # pulling does not pay: it computes
    assert choice.rank({"a": slow, "b": ReplicaStats(2, 1.1, 0.1)}, prompt)[0] == "a"


def test_calls_since_the_last_report_count() -> None:
    choice = PredictedChoice()
    stats = {"a": IDLE, "b": ReplicaStats(1, 0.35, 0.1)}
    for _ in range(2):
        assert choice.rank(stats, names("x", 2))[0] == "a"
        choice.sent("a", IDLE, names(f"y{_}", 2))
    assert choice.rank(stats, names("x", 2))[0] == "b"
    stats["a"] = ReplicaStats(2, 0.0, 0.1)  # its next report has them
    assert choice.rank(stats, names("x", 2))[0] == "a"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    choice, prompt = PredictedChoice(), names("x", 10)
    choice.sent("b", IDLE, prompt)
    choice.keep(["a"])
    stats = {"a": IDLE, "b": ReplicaStats(1, 0.5, 0.1)}
    assert choice.rank(stats, prompt) == ["a", "b"]


def test_stats_travel_as_json() -> None:
    stats = ReplicaStats(3, 0.25, 0.5, None)
    assert ReplicaStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats
    assert ReplicaStats.from_json({}) == ReplicaStats()


def test_stats_follow_from_what_the_server_publishes() -> None:
    load = {"predicted_queue_seconds": 0.5, "predicted_ttft_seconds": 2.5}
    metrics = "\n".join(
        [
            'mergestep:kv_peer_pull_seconds_total{peer="x"} 1.0',
            'mergestep:kv_peer_pull_seconds_total{peer="y"} 3.0',
            'mergestep:kv_peer_pulled_pages_total{peer="x"} 100.0',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1.0',
        ]
    )
    found = stats_of(7, load, 512, metrics)
    assert found.number == 7 and found.queue_s == 0.5
    assert found.block_s == pytest.approx(2.0 / 512 * BLOCK_TOKENS)
    assert found.pull_s == pytest.approx(4.0 / 1600 * BLOCK_TOKENS)
    shorter = stats_of(8, load, 256, metrics)
    assert shorter.block_s == pytest.approx(2.0 / 256 * BLOCK_TOKENS)
    nothing = {"predicted_queue_seconds": 0.0, "predicted_ttft_seconds": 0.0}
    unknown = stats_of(1, nothing, 512, "")
    assert unknown == ReplicaStats(1)


def test_a_call_has_the_names_of_its_prompt() -> None:
    text = "a" * 2000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    call = call_of("POST", "/v1/chat/completions", [("Authorization", "Bearer x")], body)
    assert len(call["names"]) >= 7 and call["body"] == body
    other = call_of("POST", "/v1/chat/completions", [("authorization", "Bearer y")], body)
    assert not set(call["names"]) & set(other["names"]), "keys share no K/V"
    deep = b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}"
    for wrong in (b"", b"no json", b"[1]", deep):
        assert call_of("POST", "/v1/completions", [], wrong)["names"] == []


def test_headers_of_one_connection_are_not_handed_on() -> None:
    given = [("Host", "x"), ("Connection", "close"), ("X-Own", "1"), ("content-length", "3")]
    assert kept_headers(given) == [("X-Own", "1")]


def test_settings_become_those_of_a_server_of_this_machine() -> None:
    text = as_toml({"model": 'a "b"', "max_num_seqs": 4, "prefix_cache": False, "port": 9})
    assert 'model = "a \\"b\\""' in text and "prefix_cache = false" in text
    assert 'host = "127.0.0.1"' in text and "port = 0" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_replicas": 3}, "min_replicas 3 must be from 0 to max_replicas"),
        ({"max_replicas": 0, "min_replicas": 0}, "min_replicas 0"),
        ({"max_replicas": 1.5}, "max_replicas must be a number"),
        ({"max_replicas": float("inf")}, "max_replicas must be a number from 0 on, not inf"),
        ({"cpus_per_replica": float("nan")}, "cpus_per_replica must be a number"),
        ({"grow_seconds": float("inf")}, "grow_seconds must be a number"),
        ({"api_keys": "x"}, "api_keys is no argument"),
        ({"queue_seconds": "1"}, "queue_seconds must be a number"),
        ({"cpus_per_replica": 0}, "cpus_per_replica must be at least 1"),
        ({"port": 8000}, "port is Ray Serve's own"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: a replica is one process"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_args(args)


# -- scaling


def context(now_s: float, target: int, waits: dict[str, float], calls: int = 0) -> Any:
    return SimpleNamespace(
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=3,
        aggregated_metrics={QUEUE: waits},
        running_replicas=list(waits),
        target_num_replicas=target,
        current_time=now_s,
        total_num_requests=calls,
    )


def test_replicas_follow_the_predicted_wait() -> None:
    policy = QueuePolicy(queue_s=1.0, grow_s=5.0, shrink_s=10.0)
    assert policy(context(0.0, 0, {}))[0] == 0
    assert policy(context(1.0, 0, {}, calls=1))[0] == 1, "the first call starts one"
    assert policy(context(2.0, 1, {"a": 3.0}, calls=9))[0] == 1
    assert policy(context(7.5, 1, {"a": 3.0}, calls=9))[0] == 2
    assert policy(context(8.0, 2, {"a": 3.0}, calls=9))[0] == 2, "the second one still starts"
    assert policy(context(9.0, 2, {"a": 0.0, "b": 0.0}))[0] == 2
    assert policy(context(20.0, 2, {"a": 0.0, "b": 0.0}))[0] == 1
    assert policy(context(21.0, 1, {"a": 0.0}, calls=1))[0] == 1
    assert policy(context(22.0, 1, {"a": 0.0}))[0] == 1
    assert policy(context(33.0, 1, {"a": 0.0}))[0] == 0


def test_what_replicas_that_are_gone_have_reported_does_not_count() -> None:
    policy = QueuePolicy(queue_s=1.0, grow_s=0.0, shrink_s=10.0)
    found = context(0.0, 1, {"a": 0.0, "b": 9.0})
    found.running_replicas = ["a"]
    assert policy(found)[0] == 1
