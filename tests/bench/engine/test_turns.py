"""The measurement of turns of chats: what each prompt has, what is computed again, and its sums; on
a server made here, and on a small model in its own process."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.engine.turn_servers import Answer, _LlamaCpp, llama_cpp
from bench.engine.turns import (
    KINDS,
    OFF,
    OURS,
    PEER,
    Kind,
    Shape,
    Turn,
    measure,
    run_chats,
    total_table,
    turns,
)
from ops.cpu import native_library
from serve.errors import ConfigError, MergestepError
from tests.support.engine.checkpoints import checkpoint

SHAPE = Shape(first=40, new=10, answer=4, turns=3)


class Counting:
    """A server that finds the longest known prefix and takes a millisecond a token that it
    computes, and as much for each of an answer. Answers are numbers above 1000."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._known: list[list[int]] = []
        self._rng = random.Random(0)

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        self.prompts.append(list(prompt))
        found = max((self._shared(prompt, text) for text in self._known), default=0)
        answer = [1000 + self._rng.randrange(10**6) for _ in range(num_tokens)]
        self._known.append([*prompt, *answer])
        computed = len(prompt) - found
        return Answer(answer, computed, 1e-3 * computed, 1e-3 * (computed + num_tokens))

    @staticmethod
    def _shared(one: Sequence[int], other: Sequence[int]) -> int:
        pairs = zip(one, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_a_prompt_has_the_whole_chat_so_far() -> None:
    server = Counting()
    found = run_chats(server, Kind(), SHAPE, 900, seed=1)
    assert [(size, new) for size, new, _ in found] == [(40, 40), (54, 10), (68, 10)]
    assert [answer.computed for _, _, answer in found] == [40, 10, 10]
    first, second, _ = server.prompts
    assert second[:44] == first + found[0][2].token_ids


def test_two_chats_are_asked_in_turn() -> None:
    server = Counting()
    found = run_chats(server, Kind(chats=2), SHAPE, 900, seed=1)
    assert [size for size, _, _ in found] == [40, 40, 54, 54, 68, 68]
    one, other = server.prompts[::2], server.prompts[1::2]
    assert one[0] != other[0]
    for chat in (one, other):
        assert chat[2][:54] == chat[1] and chat[1][:40] == chat[0]


def test_the_end_of_an_answer_is_new_where_its_beginning_is_left_out() -> None:
    server = Counting()
    found = run_chats(server, Kind(kept=0.5), SHAPE, 900, seed=1)
    assert [(size, new) for size, new, _ in found] == [(40, 40), (52, 12), (64, 12)]
    assert server.prompts[1][40:42] == found[0][2].token_ids[2:]
    assert [answer.computed for _, _, answer in found] == [40, 12, 12]


def test_every_server_gets_the_same_chats_and_sums_have_ratios() -> None:
    servers = {OURS: Counting(), PEER: Counting()}
    results = measure(servers, list(KINDS), SHAPE, 900, repeats=3)
    assert list(results) == list(KINDS)
    assert servers[OURS].prompts == servers[PEER].prompts
    assert [turn.computed for turn in results["one chat"][OURS]] == [40, 10, 10]
    assert [turn.computed for turn in results["two in turn"][PEER]] == [40, 40, 10, 10, 10, 10]
    slow = [turn._replace(first_s=3 * turn.first_s) for turn in results["one chat"][PEER]]
    table = total_table({"one chat": results["one chat"] | {PEER: slow}}, SHAPE.first)
    cells = [list(column.cells) for column in table.columns]
    assert cells[4] == ["60", "60"]  # computed
    assert cells[5:7] == [["0.060", "0.180"], ["1.00", "3.00"]]
    assert cells[7:9] == [["0.020", "0.060"], ["1.00", "3.00"]]


def test_only_one_chat_is_asked_without_the_cache() -> None:
    results = measure({OURS: Counting(), OFF: Counting()}, list(KINDS), SHAPE, 900, repeats=1)
    assert [name for name, result in results.items() if OFF in result] == ["one chat"]


class _Handler(BaseHTTPRequestHandler):
    """Answers as llama-server does; refuses prompts of one token."""

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        prompt = json.loads(self.rfile.read(size))["prompt"]
        self.send_response(200 if len(prompt) > 1 else 400)
        self.end_headers()
        for token in (7, 8):
            self._event({"content": "t", "tokens": [token], "stop": False})
        self._event({"content": "", "tokens": [], "stop": True, "timings": {"prompt_n": 3}})

    def _event(self, document: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


@pytest.fixture
def llama_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_events_of_llama_cpp_are_read(llama_port: int) -> None:
    answer = _LlamaCpp(llama_port).ask([1, 2, 3, 4, 5], 2)
    assert answer.token_ids == [7, 8] and answer.computed == 3
    assert 0 < answer.first_s <= answer.last_s
    with pytest.raises(MergestepError, match="400"):
        _LlamaCpp(llama_port).ask([1], 2)


def test_a_missing_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer-server"), llama_cpp("no-such", tmp_path, ()):
        pass
    with pytest.raises(ConfigError, match="--peer-model"), llama_cpp("true", tmp_path / "x", ()):
        pass


def test_a_peer_that_ends_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(MergestepError, match="did not start"), llama_cpp("false", file, ()):
        pass


def test_chats_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        turns(str(checkpoint("lfm2", "long")), shape=Shape(first=10**6))


@pytest.mark.process
@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_later_turns_of_a_small_model_compute_little(tmp_path: Path) -> None:
    """With the cache a turn computes its new tokens and at most one page of K/V more, which has 256
    tokens of so small a model."""
    path, file = checkpoint("lfm2", "long"), tmp_path / "found.json"
    shape = Shape(first=400, new=30, answer=10, turns=3)
    results = turns(str(path), shape=shape, kinds=["one chat"], repeats=1, json_file=file)
    found = results["one chat"]
    assert [turn.computed for turn in found[OFF]] == [400, 440, 480]
    later = found[OURS][1:]
    assert all(30 < turn.computed <= 30 + 1 + 256 for turn in later), later
    assert all(0 < turn.first_s < turn.last_s for turn in found[OURS])
    document = json.loads(file.read_text())
    assert Turn(**document["one chat"][OURS][2]) == found[OURS][2]
