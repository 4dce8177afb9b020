"""Whether a call is parted, by what servers say of themselves; no server has a fixed role."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson
import pytest

from serve.cluster.front.apart import (
    Candidate,
    Decision,
    ServerLoad,
    decide,
    next_server,
    role_counts,
)
from serve.cluster.front.parting import Parting
from serve.cluster.front.prompt import Lengths, Prompt
from serve.cluster.front.replicas import Replica, ReplicaSet

LOAD: dict[str, Any] = {
    "queue_s": 0.0,
    "num_streams": 0,
    "steps": [[1, 0.041], [64, 0.104]],
    "slowdown": 1.0,
    "next_slowdown": 1.5,
    "prompt_s": 0.0,
    "prompts": [[64, 0.15, 0.01], [256, 0.6, 0.03], [1024, 2.4, 0.1]],
    "engine": "a",
    "listens": True,
    "pulls_from": ["a"],
}


def load(**changes: Any) -> ServerLoad:
    found = ServerLoad.read(orjson.dumps(LOAD | changes).decode())
    assert found is not None
    return found


def server(
    num_streams: int = 0, share: float = 0.0, queue_s: float = 0.0, new: float = 1024.0, **more: Any
) -> Candidate:
    """A server whose step takes 40 ms, and 1 ms more for each stream."""
    changes: dict[str, Any] = {"num_streams": num_streams}
    if num_streams:
        changes["slowdown"] = 1.5
    return Candidate(load(**changes | more), queue_s, num_streams, share, new, 0.05)


def parted(*servers: Candidate | None, home: int = 0, output: float = 128.0) -> Decision:
    return decide(servers, home, 1024.0, output)


def test_servers_without_load_share_nothing() -> None:
    """The first call has a server to itself: a hand-over would only cost time."""
    found = parted(server(), server())
    assert found.decode is None and found.reason == "does_not_pay"
    assert "does not pay" in found.sentence(1024.0)


def test_streams_are_left_alone_where_another_server_has_none() -> None:
    """A prompt that is cached where eight streams run would still go there; a new one does not
    stall them."""
    found = parted(server(8), server(0, share=0.4))
    assert (found.prefill, found.decode) == (1, 0)
    assert found.apart_s < found.together_s
    assert "apart from its answer" in found.sentence(1024.0)


def test_sentences_do_not_contradict_their_sums() -> None:
    reason = "does_not_pay"
    assert "parting would save less than 25%: 6.17 s at two servers, 6.98 s at one" in (
        Decision(0, None, 6.98, 6.17, reason).sentence(512.0)
    )
    assert "parting does not pay: 7.17 s" in Decision(0, None, 6.98, 7.17, reason).sentence(512.0)
    assert "its answer: 4.17 s at two servers" in Decision(0, 1, 6.98, 4.17, "").sentence(512.0)
    assert "serves the calls of late best: 7.17 s" in Decision(0, 1, 6.98, 7.17, "").sentence(512.0)


def test_roles_follow_load() -> None:
    """The same two servers change places when their loads do."""
    one, two = server(8), server(0, share=0.6)
    assert parted(one, two)[:2] == (1, 0)
    assert parted(two, one)[:2] == (0, 1)
    assert parted(two, one, home=1)[:2] == (0, 1)


def test_a_long_wait_for_the_prompt_is_no_gain() -> None:
    assert parted(server(1), server(0, share=0.6, queue_s=60.0)).decode is None


def test_a_dear_hand_over_does_not_pay() -> None:
    dear = replace(server(8), handover_s=1e3)
    assert parted(dear, server(0, share=0.6), home=1).decode is None


def test_a_short_answer_does_not_pay_for_its_hand_over() -> None:
    busy, other = server(2), server(0, share=0.1)
    assert parted(busy, other, home=1, output=2.0).decode is None
    assert parted(busy, replace(other, prompt_share=0.8), home=1, output=500.0).decode == 0


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ((server(8), None), "no_peers"),
        ((server(8), server(engine="b", pulls_from=["c"], share=0.6)), "no_peers"),
        ((server(8, pulls_from=[]), server(pulls_from=[], share=0.6)), "no_peers"),
        ((server(8, listens=False), server(listens=False, share=0.6)), "no_peers"),
        ((server(8, new=100.0), server(share=0.6)), "short"),
        ((server(8), server(steps=[[1, 0.0]], share=0.6)), "unlearned"),
        ((server(8), server(prompts=[[64, 0.0, 0.0]], share=0.6)), "unlearned"),
    ],
)
def test_why_a_call_stays(servers: tuple[Candidate | None, ...], reason: str) -> None:
    found = parted(*servers)
    assert (found.prefill, found.decode, found.reason) == (0, None, reason)
    assert found.apart_s == math.inf and found.sentence(1024.0).endswith(".") is False


def test_the_server_that_decodes_is_chosen_again_after_the_prompt() -> None:
    busy = server(0, share=0.6)
    assert next_server([server(8), busy], 1, 1024.0, 128.0) == 0
    assert next_server([server(8, share=0.6), server(0)], 1, 1024.0, 128.0) is None
    assert next_server([None, busy], 1, 1024.0, 128.0) is None
    assert next_server([server(8, pulls_from=["b"]), busy], 1, 1024.0, 128.0) is None
    assert next_server([server(8, pulls_from=[]), busy], 1, 1024.0, 128.0) is None


LISTENS: dict[str, Any] = {"listens": True, "pulls_from": []}
PULLS: dict[str, Any] = {"listens": False}


@pytest.mark.parametrize("num_prefill", [0, 1, 2, 5])
@pytest.mark.parametrize("home", [0, 1])
def test_a_busy_server_that_pulls_from_none_computes_the_prompts(
    num_prefill: int, home: int
) -> None:
    """The one with the fewest streams cannot: nothing pulls from it. There is still one pair."""
    for second in (PULLS, {}):
        servers = server(5, 0.6, **LISTENS), server(0, **second)
        found = decide(servers, home, 1024.0, 2048.0, num_prefill)
        assert found.apart_s < math.inf and found.decode in (None, 1)
    found = decide(servers, 0, 1024.0, 2048.0, num_prefill)
    assert (found.prefill, found.decode) == (0, 1)


def test_of_three_servers_that_which_pulls_from_none_has_the_role() -> None:
    servers = server(2, **LISTENS), server(0, share=0.6), server(1)
    found = decide(servers, 1, 1024.0, 2048.0, 1)
    assert (found.prefill, found.decode) == (0, 2)


def test_how_many_servers_can_compute_prompts_for_the_others() -> None:
    both, listens, pulls = server(), server(**LISTENS), server(**PULLS)
    assert [*role_counts([both, both, both])] == [1, 2]
    assert [*role_counts([listens, both, both])] == [1, 2]
    assert [*role_counts([listens, listens, pulls])] == [2]
    assert [*role_counts([listens, pulls, pulls])] == [1]
    assert [*role_counts([listens, listens])] == [*role_counts([pulls, pulls])] == []
    assert [*role_counts([listens, pulls, None])] == []


def test_only_connected_servers_share_calls() -> None:
    """A server that is connected to a third one cannot pull from the second."""
    one = server(8, engine="a", pulls_from=["b"])
    two = server(0, share=0.6, engine="b", pulls_from=["c"])
    assert parted(one, two)[:2] == (1, 0) and parted(one, two, home=1)[:2] == (1, 0)
    assert next_server([one, two], 1, 1024.0, 128.0) == 0
    assert next_server([two, one], 1, 1024.0, 128.0) is None
    stranger = replace(one, load=load(num_streams=8, engine="a", pulls_from=["d"]))
    assert parted(stranger, two).reason == "no_peers"


def test_times_between_the_known_lengths() -> None:
    one = load()
    assert one.prefill_s(1024) == pytest.approx(2.4) and one.prefill_s(640) == pytest.approx(1.5)
    assert one.prefill_s(32) == pytest.approx(0.075) and one.prefill_s(1792) == pytest.approx(4.2)
    assert one.pull_s(1024) == pytest.approx(0.1)
    assert [one.step_of(n) for n in (0, 1, 4, 80)] == pytest.approx([0.041, 0.041, 0.044, 0.12])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[]",
        "{}",
        orjson.dumps(LOAD | {"prompts": [[1, 2]]}).decode(),
        orjson.dumps(LOAD | {"prompts": 1}).decode(),
        orjson.dumps(LOAD | {"steps": [[2, 1.0], [1, 1.0]]}).decode(),
        orjson.dumps(LOAD | {"prompts": [[0, 1.0, 1.0]]}).decode(),
        orjson.dumps(LOAD | {"engine": ""}).decode(),
        orjson.dumps(LOAD | {"engine": "x" * 5000}).decode(),
        orjson.dumps(LOAD | {"pulls_from": 1}).decode(),
    ],
)
def test_headers_of_other_servers_say_nothing(text: str) -> None:
    assert ServerLoad.read(text) is None


def test_the_share_of_prompts_and_of_other_streams() -> None:
    replica = Replica("http://h")
    replica.num_streams = 2
    replica.note_load(load(num_streams=5), 0.5)
    assert replica.num_others == 3 and replica.prompt_share == 0.0
    for second in range(1, 40):
        replica.note_load(load(prompt_s=0.7 * second), 1.0)
    assert replica.prompt_share == pytest.approx(0.7, rel=0.05)
    for check in range(200):  # as exact as the header is
        replica.note_load(load(prompt_s=round(27.3 + 0.13 * check, 1)), 0.2)
    assert replica.prompt_share == pytest.approx(0.66, abs=0.05)
    replica.prompt_share = 0.7
    replica.note_load(load(prompt_s=0.0), 1.0)  # it has been started again
    assert replica.prompt_share == pytest.approx(0.7, rel=0.05)
    replica.note_load(None, 1.0)
    assert replica.load is None


def test_a_hand_over_is_learned_without_its_pull() -> None:
    replica = Replica("http://h", load=load())
    for _ in range(30):
        replica.note_handover(0.5, 1024.0)
    assert replica.handover_s == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize(
    ("code", "reason"), [("continuation_differs", "no_peers"), ("overloaded", "does_not_pay")]
)
def test_calls_stay_after_hand_overs_that_are_refused(code: str, reason: str) -> None:
    """A refusal for good bars the pair at once; others make hand-overs dear, one by one."""
    servers = ReplicaSet(["http://a", "http://b"], lost_after_s=1.0)
    one, two = servers.replicas
    one.load = load(engine="a", pulls_from=["b"], num_streams=2, slowdown=1.5)
    two.load = load(engine="b", pulls_from=["a"])
    one.is_ready = two.is_ready = True
    one.num_others, one.num_calls, two.prompt_share = 2, 2, 0.6
    parting = Parting(servers, is_on=True)
    prompt = Prompt([], 1024, is_counted=True, is_stream=True, most=64, can_part=True)
    moved = 0
    for now_s in range(10):
        two.sent_s = one.sent_s = 0.0
        _, following = parting.choose(prompt, (), float(now_s))
        if following is not None:
            moved += 1
            parting.not_moved(prompt, two, following, code)
    assert moved == (1 if reason == "no_peers" else 2), parting.counts
    assert parting.counts.num_together == {reason: 10 - moved}


def test_lengths_are_learned() -> None:
    lengths = Lengths()
    text, tokens = Prompt([], 4000), Prompt([], 900, is_counted=True, most=50)
    assert lengths.of_prompt(text) == 1000 and lengths.of_prompt(tokens) == 900
    for _ in range(200):
        lengths.learn(text, 2000, 20)
    assert lengths.of_prompt(text) == pytest.approx(2000, rel=0.01)
    assert lengths.of_answer(text) == pytest.approx(20, rel=0.01)
    assert lengths.of_answer(tokens) == pytest.approx(20, rel=0.01)
    assert lengths.of_answer(tokens._replace(most=5)) == 5
    lengths.learn(tokens, 900, 0)
    assert lengths.of_prompt(text) == pytest.approx(2000, rel=0.01)
