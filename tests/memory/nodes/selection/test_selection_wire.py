"""Requests and plans of engines whose rows of answers select what nodes read."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.wire import ErrorCode, NodePlan, Query, WireError, pack_plan, read_plan
from memory.policies.setting import KVPolicy
from tests.memory.nodes.test_wire import PLANS, REQUEST, U32, U64, as_sent, code_of, view
from tests.support.profile import examples

QUEST = KVPolicy("quest", share=0.12)

POSITIVE = st.integers(1, 2**32 - 1)
SHARES = st.floats(0, 1, exclude_min=True)
BUDGETS = st.one_of(
    st.none(),
    st.builds(lambda tokens, least: KVPolicy("quest", tokens, None, least), POSITIVE, POSITIVE),
    st.builds(lambda share, least: KVPolicy("quest", None, share, least), SHARES, POSITIVE),
)


@st.composite
def selecting_plans(draw) -> NodePlan:
    plan = draw(PLANS)
    count = len(plan.queries)
    return plan._replace(prompt_lens=draw(st.lists(U32, min_size=count, max_size=count)))


@st.composite
def plans_with_budgets(draw) -> NodePlan:
    plan = draw(selecting_plans())
    count = len(plan.queries)
    return plan._replace(policies=draw(st.lists(BUDGETS, min_size=count, max_size=count)))


@given(U32, U64, selecting_plans())
def test_prompt_lengths_follow_where_rows_select(epoch, number, plan):
    message = view(pack_plan(epoch, number, plan))
    assert read_plan(message, selects=True) == plan
    without = pack_plan(epoch, number, plan._replace(prompt_lens=[]))
    assert len(message) == len(without) + 4 * len(plan.queries)
    assert bytes(message[: len(without)]) == without, "nothing changes where no row selects"
    if plan.queries:
        assert code_of(read_plan, message) is ErrorCode.FORM
        with pytest.raises(WireError, match="a plan of"):
            read_plan(view(without), selects=True)


@given(U32, U64, plans_with_budgets())
def test_budgets_follow_where_queries_have_their_own(epoch, number, plan):
    message = view(pack_plan(epoch, number, plan))
    assert read_plan(message, selects=True) == plan
    if plan.queries:
        assert code_of(read_plan, message) is ErrorCode.FORM, "in a session without a policy"
        for cut in (1, 16) if len(plan.queries) > 1 else (1,):
            with pytest.raises(WireError, match="a plan of"):
                read_plan(message[:-cut], selects=True)


def test_a_budget_beyond_all_sequences_is_sent_as_the_largest():
    plan = NodePlan([], [Query(0, 1, 40)], [], [5], [KVPolicy("quest", tokens=10**40)])
    [found] = read_plan(view(pack_plan(1, 1, plan)), selects=True).policies
    assert found == KVPolicy("quest", tokens=2**32 - 1)


@pytest.mark.parametrize(
    "budget",
    [
        (5, 1, 0.5),
        (0, 1, 0.0),
        (5, 0, 0.0),
        (0, 0, 0.5),
        (0, 1, 1.5),
        (0, 1, -0.5),
        (0, 1, math.inf),
        (0, 1, math.nan),
        (5, 1, math.nan),
    ],
)
def test_absurd_budgets_are_refused(budget):
    plan = NodePlan([], [Query(0, 1, 40)], [], [5], [QUEST])
    message = bytearray(pack_plan(1, 1, plan))
    struct.pack_into("<IId", message, len(message) - 16, *budget)
    with pytest.raises(WireError, match="a budget of"):
        read_plan(memoryview(message), selects=True)


@st.composite
def choosing_plans(draw) -> NodePlan:
    """Plans in which some queries have rows that choose."""
    plan = draw(PLANS)
    queries = [
        query._replace(num_rows=rows, num_own=rows * chooses)
        for query in plan.queries
        for rows, chooses in [draw(st.tuples(st.integers(1, 5), st.booleans()))]
    ]
    choosing = [query.num_own for query in queries if query.num_own]
    counts = [len(choosing), sum(choosing)]
    lists = [draw(st.lists(U32, min_size=count, max_size=count)) for count in counts]
    return plan._replace(queries=queries, positions=lists[0], wanted=lists[1])


@examples(100)
@given(U32, U64, choosing_plans())
def test_what_rows_choose_follows_in_a_session_with_a_stripe(epoch, number, plan):
    message = view(pack_plan(epoch, number, plan))
    assert read_plan(message, selects=True, is_striped=True) == plan
    short = view(bytes(message)[:-4])
    assert code_of(lambda part: read_plan(part, is_striped=True), short) is ErrorCode.FORM
    if plan.positions:
        assert code_of(read_plan, message) is ErrorCode.FORM


STRIPED = replace(
    REQUEST,
    layers=REQUEST.layers[:2],
    group_layers=[[0, 1]],
    page_tokens=[32],
    num_places=[16],
    kv_dtype="int8",
    prefix_only=True,
    kv_policy=QUEST,
    stripe=(1, 3),
)


def test_a_stripe_is_part_of_the_request_where_there_is_one():
    assert AttachRequest.from_json(as_sent(STRIPED)) == STRIPED
    assert "stripe" not in as_sent(replace(REQUEST, kv_dtype="int8", kv_policy=QUEST))


@pytest.mark.parametrize(
    "stripe", [5, [], [1], [1, 2, 3], [3, 3], [-1, 3], [0, 0], [0, 65], [0.5, 2], ["0", "2"], {}]
)
def test_absurd_stripes_are_refused(stripe):
    content = as_sent(STRIPED) | {"stripe": stripe}
    assert code_of(AttachRequest.from_json, content) is ErrorCode.SHAPE


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_policy": None},
        {"prefix_only": False},
        {"layers": [STRIPED.layers[0], replace(STRIPED.layers[1], window=40)]},
        {"group_layers": [[0], [1]], "page_tokens": [32] * 2, "num_places": [16] * 2},
    ],
)
def test_stripes_are_of_whole_ranges_in_one_group(changed):
    assert code_of(AttachRequest.from_json, as_sent(replace(STRIPED, **changed))) is ErrorCode.SHAPE


@pytest.mark.parametrize(
    "policy", [QUEST, KVPolicy("quest", tokens=512), KVPolicy("quest", share=0.125, least=32)]
)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_policy_is_part_of_the_request_where_there_is_one(policy, kv_dtype):
    request = replace(REQUEST, kv_dtype=kv_dtype, kv_policy=policy)
    assert AttachRequest.from_json(as_sent(request)) == request
    assert "kv_policy" not in as_sent(REQUEST), "nodes of earlier versions"


def test_layers_that_see_all_keys_have_bounds():
    request = replace(REQUEST, kv_dtype="int8", kv_policy=QUEST)
    whole, windowed = NodeLayout(request).groups
    assert None not in whole.bounds and not windowed.has_bounds
    [plain, _] = NodeLayout(replace(request, kv_policy=None)).groups
    assert not plain.has_bounds and plain.offsets[1] < whole.offsets[1]


BAD_POLICIES = {
    "no object": "quest:budget=12%",
    "a list": [],
    "nothing in it": {},
    "no name": {"name": 5},
    "no policy of that name": {"name": "oracle"},
    "one that drops K/V": {"name": "h2o"},
    "no budget": {"share": None},
    "two budgets": {"tokens": 512},
    "no tokens": {"share": None, "tokens": 0},
    "tokens that nobody has": {"share": None, "tokens": 2**31},
    "true as tokens": {"share": None, "tokens": True},
    "a share of nothing": {"share": 0.0},
    "more than all": {"share": 1.5},
    "a share as text": {"share": "12%"},
    "at least nothing": {"least": 0},
    "no least": {"least": None},
}


@pytest.mark.parametrize("changed", BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_absurd_policies_are_refused(changed):
    content = as_sent(replace(REQUEST, kv_dtype="int8", kv_policy=QUEST))
    assert code_of(AttachRequest.from_json, content) is None
    policy = content["kv_policy"] | changed if isinstance(changed, dict) and changed else changed
    assert code_of(AttachRequest.from_json, content | {"kv_policy": policy}) is ErrorCode.SHAPE


@pytest.mark.parametrize(
    "changed", [{"kv_dtype": "float32"}, {"kv_dtype": "bfloat16"}, {"prefix_only": True}]
)
def test_ranges_that_cannot_select_are_refused(changed):
    content = as_sent(replace(REQUEST, kv_dtype="int8", kv_policy=QUEST)) | changed
    with pytest.raises(WireError, match="kv_policy quest needs whole ranges of K/V in tiles"):
        AttachRequest.from_json(content)


def test_segments_cannot_select():
    layers, sizes = REQUEST.layers[:2], {"page_tokens": [32], "num_places": [16]}
    request = replace(REQUEST, layers=layers, group_layers=[[0, 1]], **sizes, by_segment=True)
    request = replace(request, kv_dtype="int8")
    assert AttachRequest.from_json(as_sent(request)) == request
    with pytest.raises(WireError, match="kv_policy quest needs whole ranges of K/V in tiles"):
        AttachRequest.from_json(as_sent(replace(request, kv_policy=QUEST)))


def test_one_group_of_layers_selects():
    """A plan of few bytes may have many rows, whose budgets a node computes for each such group."""
    request = replace(REQUEST, kv_dtype="int8", kv_policy=QUEST)
    layers = [replace(layer, window=None) for layer in request.layers]
    with pytest.raises(WireError, match="kv_policy quest is for one group of layers"):
        AttachRequest.from_json(as_sent(replace(request, layers=layers)))
