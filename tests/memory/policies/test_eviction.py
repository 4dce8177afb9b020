"""The policies as pure functions of scores, and when a sequence drops tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memory.policies.drop_schedule import NEVER, SLACK, DropSchedule, layer_budgets
from memory.policies.eviction import (
    EVICTION_POLICIES,
    best_of,
    gumbel_noise,
    observed_rows,
    policy_of,
    temperature,
)
from memory.policies.setting import EVICTIONS, parse_kv_policy
from tests.support.profile import examples

REPEATED = ("window", "h2o", "keyformer")


def reference(name, scores, budget):
    """Returns what stays of a head's scores, with torch's sort."""
    n = len(scores)
    scores = torch.from_numpy(scores)
    if name == "window":
        sinks = min(4, budget // 2)
        return [*range(sinks), *range(n - budget + sinks, n)]
    recent = {
        "h2o": budget - budget // 2,
        "keyformer": max(1, round(0.3 * budget)),
        "snapkv": min(32, max(1, budget // 2)),
        "pyramid": min(32, max(1, budget // 2)),
    }[name]
    others = scores[: n - recent]
    if name in ("snapkv", "pyramid"):
        others = torch.nn.functional.max_pool1d(others[None], 7, stride=1, padding=3)[0]
    order = torch.sort(others, descending=True, stable=True).indices[: budget - recent]
    return [*sorted(order.tolist()), *range(n - recent, n)]


@examples(200)
@given(
    st.sampled_from(EVICTIONS),
    st.integers(2, 150),
    st.data(),
)
def test_policies_keep_what_a_sort_keeps(name, num_tokens, data):
    budget = data.draw(st.integers(1, num_tokens - 1))
    seed = data.draw(st.integers(0, 1000))
    # few values, so that many are equal
    scores = np.random.default_rng(seed).integers(0, 20, (3, num_tokens)).astype(np.float32)
    kept = EVICTION_POLICIES[name].keep(scores, budget)
    assert kept.dtype == np.int32 and kept.shape == (3, budget) and kept.flags.c_contiguous
    for head in range(3):
        assert kept[head].tolist() == reference(name, scores[head], budget)


def test_all_evictions_have_a_policy():
    assert tuple(sorted(EVICTION_POLICIES)) == tuple(sorted(EVICTIONS))
    for name in EVICTIONS:
        setting = parse_kv_policy(f"{name}:budget=8,least=1")
        assert policy_of(setting) is EVICTION_POLICIES[name]
        assert EVICTION_POLICIES[name].has_scores == (name != "window")


def test_equal_scores_keep_the_earlier_token():
    scores = np.array([1, 3, 2, 3, 2, 2, 0], dtype=np.float32)
    assert best_of(scores, 4).tolist() == [1, 2, 3, 4]
    assert best_of(scores, 0).tolist() == []


def test_rows_that_give_scores():
    first = {name: EVICTION_POLICIES[name].first_scored(100, 20) for name in EVICTIONS}
    assert first == {"window": 100, "h2o": 0, "keyformer": 0, "snapkv": 90, "pyramid": 90}
    assert observed_rows(1) == 1 and observed_rows(1000) == 32


def test_layer_budgets_shrink_around_the_budget():
    pyramid = parse_kv_policy("pyramid:budget=100")
    budgets = layer_budgets(pyramid, 100, 5)
    assert budgets == [150, 125, 100, 75, 50]
    assert layer_budgets(pyramid, 100, 1) == [100]
    assert layer_budgets(parse_kv_policy("h2o:budget=100"), 100, 5) == [100] * 5


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("amount", ["10,least=1", "7%", "50%", "100%", "400"])
@pytest.mark.parametrize("num_prompt", [1, 9, 80, 300])
def test_a_walk_along_the_schedule(name, amount, num_prompt):
    """Beside the obvious rule, token by token."""
    policy = parse_kv_policy(f"{name}:budget={amount}")
    schedule = DropSchedule(policy, num_prompt, 4)
    dropped, drop_at = 0, schedule.next_drop(0, 0)
    for n in range(1, 700):
        held = n - dropped
        budget = policy.budget(n)
        is_due = n == num_prompt and budget < n
        is_due |= n > num_prompt and name in REPEATED and held >= budget + SLACK
        assert is_due == (n == drop_at), (n, drop_at)
        if is_due:
            kept = min(held, max(layer_budgets(policy, budget, 4)))
            dropped = n - kept
            drop_at = schedule.next_drop(n, dropped)
        if n > num_prompt:
            assert n - dropped <= schedule.most_held(n)
    if amount == "100%":
        assert dropped == 0 and drop_at in (NEVER, num_prompt)


def test_noise_depends_on_the_seed_and_the_position_alone():
    whole = gumbel_noise(7, 2, 3, 0, 300)
    assert whole.shape == (2, 3, 300)
    for first, end in ((0, 1), (63, 65), (100, 300), (5, 5)):
        assert np.array_equal(gumbel_noise(7, 2, 3, first, end), whole[:, :, first:end])
    assert not np.array_equal(gumbel_noise(8, 2, 3, 0, 300), whole)
    assert abs(whole.mean() - 0.5772) < 0.1


def test_each_seed_has_noise_of_its_own():
    """Also negative ones, which are large without a sign."""
    seeds = (0, 1, -1, -2, 2**63 - 1, -(2**63), -(2**63) + 1, 2**53, 2**53 + 1)
    drawn = {gumbel_noise(seed, 1, 2, 0, 5).tobytes() for seed in seeds}
    assert len(drawn) == len(seeds)


def test_the_temperature_rises_with_the_answer():
    values = [temperature(position, 10, 4) for position in range(16)]
    assert values[:10] == [1.0] * 10
    assert values[10:] == [1.25, 1.5, 1.75, 2.0, 2.0, 2.0]
