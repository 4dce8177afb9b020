"""Measures the gaps between tokens of running streams while prompts arrive: with merged steps, and
with the prompts computed on another engine, from which their K/V is pulled.

    python -m bench.engine.prefill_apart --model random:llama-1b --prompt 1024

Two engines on this machine, each with one thread. One decodes four streams; prompts arrive one
after the other, each some time after the last one's first token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench.common.checkpoints import model_directory
from bench.common.second_engine import second_engine, wait_until_connected
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.engine.loader import LoadedEngine, load_engine
from serve.errors import EngineStoppedError
from serve.request import Request, TokenDelta

_STREAMS = 4
_PAUSE_S = 0.5  # between two prompts
_ROOM = 1600  # tokens of the context beside the prompt
_ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_LONG = SamplingParams(temperature=0.0, max_tokens=_ROOM - 100, ignore_eos=True)


class _Sink:
    """Notes the gaps between tokens; calls `again` when the sequence has ended."""

    def __init__(self, again: Callable[[], object] = lambda: None) -> None:
        self.gaps: list[float] = []
        self.has_come = threading.Event()
        self._again = again
        self._last_s: float | None = None

    def accept(self, request: Request) -> None:
        """Nothing is to be done."""

    def push(self, delta: TokenDelta) -> None:
        now_s = time.monotonic()
        if self._last_s is not None and delta.token_ids:
            self.gaps.append(now_s - self._last_s)
        self._last_s = now_s
        self.has_come.set()
        if delta.finish_reason is not None:
            self._last_s = None
            self._again()

    def fail(self, error: Exception) -> None:
        raise error

    def wake(self) -> None:
        """Nothing waits."""


class _Stream(_Sink):
    """Decodes one sequence after the other until the engine ends."""

    def __init__(self, loaded: LoadedEngine, number: int) -> None:
        super().__init__(self.begin)
        self._loaded = loaded
        self._prompt = [300 + number] * 20
        self.begin()

    def begin(self) -> None:
        with contextlib.suppress(EngineStoppedError):
            self._loaded.core.submit(self._prompt, _LONG, self)


def _prefill(settings: dict[str, Any], pipe: Connection) -> None:
    """The engine for prefill: computes the prompts that it gets."""
    with LLM(**settings) as llm:
        peers = llm.stats().kv_peers
        assert peers is not None
        pipe.send(peers.url)
        while (prompt := pipe.recv()) is not None:
            llm.generate(prompt, _ONE, use_tqdm=False)
            pipe.send(True)


def measure(model: str, length: int, num_prompts: int, alone_s: float) -> dict[str, Any]:
    """Returns the percentiles of gaps in milliseconds, and the times to the first token."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 1000) for _ in range(length)] for _ in range(2 * num_prompts)]
    base: dict[str, Any] = {
        "model": model,
        "max_model_len": length + _ROOM,
        "max_num_seqs": 8,
        "compute_threads": 1,
        "speculation": "off",
    }
    with second_engine(_prefill, base) as (other, key):
        config = EngineConfig(**base, kv_peer_key_file=key, kv_peers=(other.recv(),))
        loaded = load_engine(config)
        loaded.core.start()
        try:
            return _run(loaded, other, prompts, alone_s)
        finally:
            other.send(None)
            loaded.close()


def _run(
    loaded: LoadedEngine, other: Connection, prompts: list[list[int]], alone_s: float
) -> dict[str, Any]:
    wait_until_connected(lambda: loaded.core.stats().kv_peers)
    streams = [_Stream(loaded, number) for number in range(_STREAMS)]
    for stream in streams:
        stream.has_come.wait()

    def prefilled(prompt: list[int]) -> None:
        other.send(prompt)
        other.recv()

    half = len(prompts) // 2
    found: dict[str, Any] = {}
    found["alone"] = _gaps(streams, lambda: time.sleep(alone_s))
    firsts: list[float] = []
    found["merged"] = _gaps(
        streams, lambda: _send(loaded, prompts[:half], lambda prompt: None, firsts)
    )
    found["merged, first token"] = _percentiles(firsts)
    firsts = []
    found["apart"] = _gaps(streams, lambda: _send(loaded, prompts[half:], prefilled, firsts))
    found["apart, first token"] = _percentiles(firsts)
    peers = loaded.core.stats().kv_peers
    assert peers is not None
    found["pulled pages"] = sum(pull.pulled for pull in peers.pulls.values())
    return found


def _send(
    loaded: LoadedEngine,
    prompts: list[list[int]],
    before: Callable[[list[int]], None],
    firsts: list[float],
) -> None:
    """Sends prompts one after the other; appends the seconds to each one's first token."""
    for prompt in prompts:
        began_s = time.monotonic()
        before(prompt)
        sink = _Sink()
        loaded.core.submit(prompt, _ONE, sink)
        sink.has_come.wait()
        firsts.append(time.monotonic() - began_s)
        time.sleep(_PAUSE_S)


def _gaps(streams: list[_Stream], work: Callable[[], None]) -> dict[str, float]:
    """Returns percentiles of the gaps between the streams' tokens while `work` runs."""
    begins = [len(stream.gaps) for stream in streams]
    work()
    pairs = zip(begins, streams, strict=True)
    return _percentiles([gap for begin, stream in pairs for gap in stream.gaps[begin:]])


def _percentiles(seconds: list[float]) -> dict[str, float]:
    found = sorted(1e3 * value for value in seconds)
    most = len(found) - 1
    return {
        "p50": found[most // 2],
        "p99": found[round(0.99 * most)],
        "most": found[-1],
        "count": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="random:llama-1b")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--alone", type=float, default=10.0, help="seconds without prompts")
    parser.add_argument("--smoke", action="store_true", help="short, as a test of the command")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.prompt, args.prompts, args.alone = "random:tiny", 400, 2, 0.5
    found = measure(str(model_directory(args.model)), args.prompt, args.prompts, args.alone)
    for name, values in found.items():
        if isinstance(values, dict):
            text = ", ".join(f"{kind} {value:.1f}" for kind, value in values.items())
            print(f"{name}, ms: {text}")
        else:
            print(f"{name}: {values}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
