"""Which replica is next, what the hop remembers of prompts, and journals that are malformed."""

from __future__ import annotations

from typing import Any

import pytest

from serve.cluster.front.answer_log import MAX_PENDING_BYTES, AnswerLog, JournalError
from serve.cluster.front.front import FrontSettings
from serve.cluster.front.prefix_affinity import BLOCK_BYTES, PrefixAffinity, block_names
from serve.cluster.front.replicas import ReplicaSet
from serve.errors import ConfigError


def replicas(count: int, routing: str = "prefix") -> ReplicaSet:
    found = ReplicaSet([f"http://h{n}" for n in range(count)], lost_after_s=1.0, routing=routing)
    for replica in found.replicas:
        replica.is_ready = True
    return found


def chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": turn * 400} for turn in turns]}


def test_turns_of_a_chat_go_where_its_prefix_is() -> None:
    found = replicas(3)
    first = [found.choose(block_names(chat(f"a{n} b"), "")) for n in range(3)]
    assert [choice.replica.url for choice in first if choice] == [f"http://h{n}" for n in range(3)]
    for number in (2, 0, 1, 1):
        choice = found.choose(block_names(chat(f"a{number} b", "c d"), ""))
        assert choice is not None and choice.replica.url == f"http://h{number}"
        assert choice.num_new < len(block_names(chat(f"a{number} b", "c d"), ""))


def test_a_queue_that_is_longer_than_the_prefix_takes_is_left() -> None:
    found = replicas(2)
    names = block_names(chat("a b"), "")
    choice = found.choose(names)
    assert choice is not None
    near, far = choice.replica, next(r for r in found.replicas if r is not choice.replica)
    far.sent_s = near.sent_s = 0.0
    near.queue_s = 0.01
    again = found.choose(names)
    assert again is not None and again.replica is near and again.num_new == 0
    near.queue_s = 10.0
    other = found.choose(names)
    assert other is not None and other.replica is far and other.num_new == len(names)


def test_the_seconds_of_a_block_are_learned() -> None:
    found = replicas(2)
    names = block_names(chat("a b"), "")
    for number in range(100):
        choice = found.choose([b"%d %d" % (number, n) for n in range(len(names))])
        assert choice is not None
        found.note_first(choice, choice.queue_s + 0.5 * len(names))
        for replica in found.replicas:
            replica.sent_s = 0.0
    before = found.replicas[0].sent_s + found.replicas[1].sent_s
    assert found.choose(names) is not None
    after = found.replicas[0].sent_s + found.replicas[1].sent_s
    assert after - before == pytest.approx(0.5 * len(names), rel=0.01)


@pytest.mark.parametrize("routing", ["least-busy", "round-robin"])
def test_other_ways_do_not_look_at_prompts(routing: str) -> None:
    found = replicas(2, routing)
    assert not found.looks_at_prompts
    names: list[bytes] = []
    chosen = []
    for _ in range(4):
        choice = found.choose(names)
        assert choice is not None
        chosen.append(choice.replica.url)
    assert chosen == ["http://h0", "http://h1"] * 2
    found.replicas[0].num_calls = 5
    choice = found.choose(names)
    assert choice is not None
    assert choice.replica.url == ("http://h1" if routing == "least-busy" else "http://h0")


def test_nothing_is_chosen_where_none_is_ready() -> None:
    found = replicas(2)
    assert found.choose([], without=found.replicas) is None
    found.refused(found.replicas[0])
    found.lost(found.replicas[1], "test")
    assert found.choose([]) is None and found.num_ready == 0


def test_prompts_of_other_clients_have_other_names() -> None:
    body = chat("a b")
    assert len(block_names(body, "x")) == len(block_names(body, "y")) > 0
    assert not set(block_names(body, "x")) & set(block_names(body, "y"))
    longer = block_names(chat("a b", "c"), "x")
    assert longer[: len(block_names(body, "x"))] == block_names(body, "x")


def test_the_memory_of_prompts_is_bounded() -> None:
    affinity = PrefixAffinity(max_names=4)
    affinity.add([b"a", b"b", b"c"], "h0")
    affinity.add([b"a", b"d", b"e"], "h1")
    assert affinity.num_matching([b"a", b"b"]) == {"h1": 1}
    assert affinity.num_matching([b"c"]) == {"h0": 1}
    affinity.forget("h1")
    assert affinity.num_matching([b"a", b"d"]) == {}
    assert BLOCK_BYTES * len(block_names({"prompt": "x" * (1 << 22)}, "")) <= 1 << 20


@pytest.mark.parametrize(
    "stream",
    [
        b": tokens\x20no\n\n",
        b": tokens [0]\n\n",
        b": tokens [-1,[],null]\n\n",
        b': tokens ["a",[],null]\n\n',
        b": state {\n\n",
        b"data: x" * (MAX_PENDING_BYTES // 7 + 1),
    ],
)
def test_a_malformed_journal_is_an_error(stream: bytes) -> None:
    with pytest.raises(JournalError):
        AnswerLog().feed(stream)


def test_events_wait_for_their_tokens() -> None:
    log = AnswerLog()
    whole = b': state {"id": 1}\n\ndata: a\n\n: tokens [0,[5],null]\n\ndata: b\n\n'
    sent = b"".join(log.feed(whole[at : at + 3]) for at in range(0, len(whole), 3))
    assert sent == b"data: a\n\n"
    assert log.continuation == {
        "state": {"id": 1},
        "answers": [{"token_ids": [5], "finish_reason": None}],
        "num_events": 1,
    }
    log.begin_stream()  # b was not sent: its tokens are not known
    assert log.feed(b'data: c\n\n: tokens [0,[6],"stop"]\n\ndata: [DONE]\n\n') == b"data: c\n\n"
    assert log.end() == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "settings",
    [
        {"routing": "no"},
        {"prefill_apart": "no"},
        {"lost_after_s": 0.0},
        {"wait_s": -1.0},
        {"replicas": ("h:1",)},
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FrontSettings(**({"replicas": ()} | settings))
