"""How many servers compute prompts for the others, by what arrives and how long steps take."""

from __future__ import annotations

import math

import pytest

from serve.cluster.front.apart import ServerLoad
from serve.cluster.front.roles import (
    Traffic,
    apart_seconds,
    num_prefill,
    together_seconds,
)

# a step of 9 ms and 0.6 ms more for each stream; 0.7 ms a token of a prompt
STEPS = ((1, 0.009), (16, 0.018), (64, 0.047))
PROMPTS = ((64, 0.045, 0.001), (1024, 0.72, 0.02))
LOAD = ServerLoad(0, 1.0, 1.3, 0.0, STEPS, PROMPTS, "a", listens=True, pulls_from=frozenset("a"))


def traffic(rate: float, tokens: float, output: float) -> Traffic:
    found = Traffic()
    for number in range(400):
        found.note(100.0 + number / rate, tokens, output)
    assert found.rate == pytest.approx(rate, rel=0.03)
    assert (found.mean_tokens, found.mean_output) == (pytest.approx(tokens), pytest.approx(output))
    return found


def chosen(rate: float, tokens: float, output: float, servers: int = 2, present: int = 0) -> int:
    return num_prefill([LOAD] * servers, traffic(rate, tokens, output), 0.03, present)


def test_long_answers_after_long_prompts_pay_for_roles() -> None:
    assert chosen(1.0, 1024, 512) == 1


def test_roles_are_those_that_the_servers_can_have() -> None:
    found = traffic(1.0, 1024, 512)
    assert num_prefill([LOAD] * 2, found, 0.03, 0, range(1, 2)) == 1
    assert num_prefill([LOAD] * 2, found, 0.03, 0, []) == 0
    assert num_prefill([LOAD] * 4, traffic(2.0, 1024, 512), 0.03, 0, [2]) == 2


def test_one_server_cannot_compute_the_prompts_of_two() -> None:
    assert chosen(2.0, 1024, 32) == 0
    assert apart_seconds([LOAD] * 2, traffic(2.0, 1024, 32), 0.03, 1) == math.inf
    assert together_seconds([LOAD] * 2, traffic(2.0, 1024, 32)) < 10.0


def test_short_prompts_leave_a_server_idle() -> None:
    assert chosen(4.0, 128, 256) == 0


def test_roles_follow_the_mix_of_four_servers() -> None:
    assert 1 <= chosen(2.0, 1024, 512, servers=4) <= 2
    assert chosen(2.0, 256, 512, servers=4) <= 1
    assert chosen(4.5, 1024, 64, servers=4) in (0, 3)


def test_few_calls_say_nothing() -> None:
    found = Traffic()
    assert found.rate == 0.0
    for number in range(4):
        found.note(float(number), 1024.0, 512.0)
    assert found.rate == 0.0 and num_prefill([LOAD], found, 0.03, 0) == 0


def test_the_rate_follows_what_comes() -> None:
    found = traffic(4.0, 100.0, 10.0)
    for number in range(200):
        found.note(200.0 + 2.0 * number, 100.0, 10.0)
    assert found.rate == pytest.approx(0.5, rel=0.06)


def test_what_is_near_changes_nothing() -> None:
    """Between the bounds, servers keep what they do."""
    rates = [0.02 * n for n in range(30, 80)]
    kept = [rate for rate in rates if chosen(rate, 1024, 512) != chosen(rate, 1024, 512, present=1)]
    assert kept and all(chosen(rate, 1024, 512, present=1) == 1 for rate in kept)
