"""An engine takes answers to its own requests from a memory node, and no other message."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from memory.nodes.errors import NodesLostError
from memory.nodes.node_health import MAX_STALLED_S, NodeHealth
from memory.nodes.node_link import NodeError, NodeLink
from memory.nodes.placement import Shard
from memory.nodes.wire import ErrorCode, Header, Kind, NodePlan, WireType, pack_json, read_header
from memory.policies.setting import KVPolicy
from tests.support.engine.raw_engine import REQUEST
from tests.support.nodes.remote_rig import RemoteRig, layers_of
from transport.base import PeerLostError, TransportError, TransportTimeoutError
from transport.direct import direct_pair
from transport.messages import post_bytes

_EMPTY = NodePlan([], [], [])


class Script:
    """A link to a scripted node."""

    def __init__(self, *messages: bytes):
        engine_end, self.node_end = direct_pair()
        clock = itertools.count(step=10.0)
        self.link = NodeLink("node", engine_end, Shard("head", 0, 1), lambda: next(clock))
        for message in messages:
            self.say(message)

    def say(self, message: bytes) -> None:
        post_bytes(self.node_end, message)

    def attach(self) -> int:
        return self.link.attach(REQUEST, 0.0)


def attached(num_pages=40, epoch=1, kind=Kind.ATTACHED) -> bytes:
    return pack_json(kind, epoch, {"num_pages": num_pages, "num_mappings": 300})


def refusing() -> bytes:
    return pack_json(Kind.ERROR, 1, {"code": ErrorCode.SHAPE, "text": "kv_policy is none"})


def partial(plan, layer=0, epoch=1, kind=Kind.PARTIAL) -> bytes:
    return Header(kind, epoch, plan, layer, WireType.FLOAT32, 1).packed() + bytes(4 * 17 * 4)


def test_a_node_that_sends_but_never_answers_times_out():
    """The clock advances ten seconds at each reading, and the limit is 30."""
    script = Script(attached(), *[pack_json(Kind.DRAIN, 1, {})] * 9)
    script.attach()
    with pytest.raises(TransportTimeoutError, match="no answer for 30 s"):
        script.link.answer(1, 0)
    assert script.link.is_leaving
    assert script.link.endpoint.poll() is not None, "some messages were not read"


@pytest.mark.parametrize("kind", [Kind.ATTACH, Kind.ATTACHED, Kind.QUERY, Kind.UPDATE, Kind.PLAN])
def test_a_message_kind_of_an_engine_ends_the_connection(kind):
    script = Script(attached(), partial(1, kind=kind))
    script.attach()
    with pytest.raises(NodeError, match=f"{kind.name} from a node"):
        script.link.answer(1, 0)


@pytest.mark.parametrize("num_pages", [1, 40])
def test_pages_that_are_granted(num_pages):
    assert Script(attached(num_pages)).attach() == num_pages


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "FORM"),
        (bytes(32), "FORM"),
        (attached(0), "RANGE"),
        (attached(41), "RANGE"),
        (attached(-1), "RANGE"),
        (attached(True), "RANGE"),
        (attached("4"), "RANGE"),
        (attached(None), "RANGE"),
        (attached(epoch=2), "STALE"),
        (partial(1), "FORM: PARTIAL instead"),
        (Header(Kind.ATTACHED, 1).packed() + b"[", "FORM"),
        (pack_json(Kind.ERROR, 1, {"code": 2, "text": "no room"}), "FULL: no room"),
        (pack_json(Kind.ERROR, 1, {"code": 99, "text": "x"}), "FORM: an error without a code"),
        (pack_json(Kind.ERROR, 1, {"code": "2"}), "FORM: an error without a code"),
        (pack_json(Kind.ERROR, 1, {"code": 3, "text": "x" * 9999}), "STALE: x{500}$"),
    ],
)
def test_an_invalid_grant_is_an_error(message, match):
    with pytest.raises(NodeError, match=match):
        Script(message).attach()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (attached(), "does not know kv_policy quest: it is of an earlier version"),
        (refusing(), "SHAPE: kv_policy is none"),
    ],
)
def test_a_node_that_cannot_select_is_refused(answer, match):
    """One of an earlier version ignores what it does not know, and would read everything."""
    script = Script(answer)
    request = replace(
        REQUEST, kv_dtype="int8", prefix_only=False, kv_policy=KVPolicy("quest", share=0.12)
    )
    with pytest.raises(NodeError, match=match):
        script.link.attach(request, 0.0)


def test_a_silent_node_times_out():
    with pytest.raises(TransportTimeoutError):
        Script().attach()


def test_a_window_that_is_too_small_is_refused_before_sending():
    script = Script()
    script.link.endpoint.max_message_bytes = 64 * 4 * 16 * 4
    with pytest.raises(NodeError, match="steps of 64 rows take messages of") as caught:
        script.attach()
    assert caught.value.code is ErrorCode.SHAPE
    assert script.node_end.poll() is None


def with_answers(*messages: bytes) -> Script:
    script = Script(attached())
    script.attach()
    for message in messages:
        script.say(message)
    return script


def test_answers_are_found_in_any_order():
    script = with_answers(partial(20, 1), partial(20, 0), partial(19, 0))
    for plan, layer in ((20, 0), (19, 0), (20, 1)):
        header, frame = script.link.answer(plan, layer)
        assert (header.plan, header.layer) == (plan, layer)
        script.link.endpoint.release(frame)


def test_answers_to_finished_plans_are_dropped():
    """A step that failed midway leaves such answers behind."""
    script = with_answers(*(partial(plan) for plan in range(1, 40)))
    script.link._clock = lambda: 0.0  # all answers arrive at once
    assert script.link.answer(39, 0)[0].plan == 39
    assert len(script.link._arrived) <= 9
    for number in range(40, 60):
        script.link.post_plan(number, _EMPTY)
    assert not script.link._arrived
    assert len(script.link.endpoint._held) == 1, "all answers but the taken one are held"


def test_drain_is_received_between_answers():
    script = with_answers(pack_json(Kind.DRAIN, 1, {}), partial(1))
    script.link.answer(1, 0)
    assert script.link.is_leaving


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(100),
        partial(1, epoch=2),
        pack_json(Kind.ERROR, 1, {"code": 6, "text": "x"}),
        Header(Kind.ERROR, 1).packed() + b"{",
    ],
)
def test_a_message_that_is_no_answer_is_an_error(message):
    script = with_answers(message, partial(1))
    with pytest.raises(NodeError):
        script.link.answer(1, 0)


def test_two_answers_to_one_question_are_an_error():
    script = with_answers(partial(1, 5), partial(1, 5), partial(1))
    with pytest.raises(NodeError, match="two answers for layer 5"):
        script.link.answer(1, 0)


def test_a_live_node_that_does_not_answer_is_lost():
    with pytest.raises(TransportTimeoutError, match="no answer for 30 s"):
        with_answers().link.answer(1, 0)


class Paced:
    """A link to a node that answers each query after answer_s, and the time that passes in it. As
    its reader does, it hands the stalls to `health` after each answer."""

    def __init__(self):
        self.now = self.answer_s = 0.0
        self.health = NodeHealth()
        engine_end, self._node_end = direct_pair()
        shard = Shard("head", 0, 1)
        self.link = NodeLink("node", engine_end, shard, lambda: self.now, pace=self.health.pace)
        self._poll, engine_end.poll = engine_end.poll, self.poll
        post_bytes(self._node_end, attached())
        self._answer_at = 0.0
        self.link.attach(REQUEST, 0.0)
        self._answer_at = math.inf
        self._number = 0

    def poll(self, timeout_s: float = 0.0):
        if self.now + timeout_s < self._answer_at:
            self.now += timeout_s
            return None
        self.now = max(self.now, self._answer_at)
        return self._poll(0.0)

    def ask(self) -> None:
        self._number += 1
        self.link.post_rows(Kind.QUERY, self._number, 0, WireType.FLOAT32, 0, [])
        self._answer_at = self.now + self.answer_s
        post_bytes(self._node_end, partial(self._number))
        _, frame = self.link.answer(self._number, 0, 1e5)
        self.link.endpoint.release(frame)
        if self.link.stalled_s:
            self.health.stall(self.now, self.link.stalled_s)
            self.link.stalled_s = 0.0


@pytest.mark.parametrize(
    ("usual_s", "then_s", "is_given_up"),
    [
        (0.002, 0.4, False),
        *[(0.002, then_s, True) for then_s in (0.55, 0.74, 0.9, 1.2, 5.0)],
        (0.1, 0.8, False),
        (0.1, 1.2, False),
        (0.1, 5.0, True),
    ],
)
def test_a_starved_node_is_given_up_and_one_that_engines_share_is_kept(
    usual_s, then_s, is_given_up
):
    """From some time on all answers take longer than usual."""
    node = Paced()
    node.answer_s = usual_s
    for _ in range(100):
        node.ask()
    assert not node.health.stalls_too_often and node.link.unanswered_s == 0.0
    began_s, node.answer_s = node.now, then_s
    while node.now < began_s + 1000.0 and not node.health.stalls_too_often:
        node.ask()
    assert node.health.stalls_too_often == is_given_up
    assert not is_given_up or node.now <= began_s + 2.5 * MAX_STALLED_S


def test_a_pause_of_the_engine_itself_is_no_stall():
    """The process may be stopped or the machine may sleep."""
    node = Paced()
    node.answer_s = 0.01
    for _ in range(10):
        node.ask()
    node.answer_s = 25.0
    poll = node.poll

    def sleep_first(timeout_s=0.0):
        node.now += 24.9
        node.link.endpoint.poll = poll
        return None

    node.link.endpoint.poll = sleep_first
    node.ask()
    assert not node.health.stalls_too_often


def test_a_node_that_has_closed_is_lost():
    script = with_answers(partial(1))
    script.node_end.close()
    script.link.answer(1, 0)  # a message from before the end counts
    with pytest.raises(PeerLostError):
        script.link.answer(1, 1)
    with pytest.raises(TransportError):
        script.link.post_plan(2, _EMPTY)
    assert script.link.is_lost


def rows_of(message: bytearray, rows: int) -> bytes:
    header = read_header(memoryview(message))
    return header._replace(rows=rows).packed() + bytes(message[32:])


EVIL = {
    "more rows": lambda message: rows_of(message, 2) + bytes(len(message) - 32),
    "fewer rows": lambda message: rows_of(message, 0)[:32],
    "2^32 - 1 rows": lambda message: rows_of(message, 2**32 - 1),
    "cut": lambda message: bytes(message[:-4]),
    "longer": lambda message: bytes(message) + bytes(4),
    "in fewer bits": lambda message: message[:18] + b"\1" + message[19:],
    "an update": lambda message: message[:3] + bytes([Kind.UPDATE]) + message[4:],
    "noise": lambda message: bytes(range(200)),
}


@pytest.mark.parametrize("change", EVIL.values(), ids=EVIL)
def test_an_answer_of_the_wrong_shape_loses_the_node(change, monkeypatch):
    """The answer is not merged and writes no memory."""
    layers = layers_of(1)
    rig = RemoteRig(layers, ("a", "b"))
    item = rig.kv.open(100)
    inputs = [torch.randn(40, heads, 32) for heads in (8, 4, 4)]
    rig.step([(item, 40, 40)], [inputs])
    end = rig.nodes.ends["b"]
    poll = end.poll

    def evil_poll(timeout_s=0.0):
        if end._inbox:
            end._inbox[0] = bytearray(change(end._inbox[0]))
        return poll(timeout_s) if end._inbox else _gone()

    monkeypatch.setattr(end, "poll", evil_poll)
    with pytest.raises(NodesLostError, match="memory node b"):
        rig.step([(item, 1, 41)], [[x[:1] for x in inputs]])
    assert end.is_lost
    rig.close()


def _gone():
    raise TransportTimeoutError("nothing more comes")
