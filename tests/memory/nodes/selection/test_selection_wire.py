"""Requests and plans of engines whose rows of answers select what nodes read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.wire import ErrorCode, NodePlan, WireError, pack_plan, read_plan
from tests.memory.nodes.test_wire import PLANS, REQUEST, U32, U64, as_sent, code_of, view

QUEST = "quest:budget=12.5%"


@st.composite
def selecting_plans(draw) -> NodePlan:
    plan = draw(PLANS)
    count = len(plan.queries)
    return plan._replace(prompt_lens=draw(st.lists(U32, min_size=count, max_size=count)))


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


@pytest.mark.parametrize("kv_policy", [QUEST, "quest:budget=512"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_policy_is_part_of_the_request_where_there_is_one(kv_policy, kv_dtype):
    request = replace(REQUEST, kv_dtype=kv_dtype, kv_policy=kv_policy)
    assert AttachRequest.from_json(as_sent(request)) == request
    assert "kv_policy" not in as_sent(REQUEST), "nodes of earlier versions"


def test_layers_that_see_all_keys_have_bounds():
    request = replace(REQUEST, kv_dtype="int8", kv_policy=QUEST)
    whole, windowed = NodeLayout(request).groups
    assert all(whole.bounds) and not any(windowed.bounds)
    [plain, _] = NodeLayout(replace(request, kv_policy="off")).groups
    assert not any(plain.bounds) and plain.offsets[1] < whole.offsets[1]


BAD_REQUESTS = {
    "no text": {"kv_policy": 12},
    "a long text": {"kv_policy": f"quest:budget={'9' * 60}"},
    "no policy of that name": {"kv_policy": "oracle:budget=12%"},
    "no budget": {"kv_policy": "quest"},
    "one that drops K/V": {"kv_policy": "h2o:budget=12%"},
    "off": {"kv_policy": "off:"},
    "K/V without tiles": {"kv_dtype": "float32"},
    "stripes": {"prefix_only": True},
    "segments": {"by_segment": True, "layers": REQUEST.to_json()["layers"][:2] * 2},
}


@pytest.mark.parametrize("changed", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_absurd_policies_are_refused(changed):
    content = as_sent(replace(REQUEST, kv_dtype="int8", kv_policy=QUEST)) | changed
    assert code_of(AttachRequest.from_json, content) is ErrorCode.SHAPE
