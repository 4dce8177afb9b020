"""The common part of the peers' runners: options, the columns of `serve bench latency`, the output.

The runners are scripts for the peer's own virtual environment. They import nothing of this package
but this file, which lies beside them, and download nothing. Each column is measured after a warm-up
run; prefill is the median of three. `serve bench latency` adds --columns and --requests to their
commands.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

CONTEXT, NUM_DECODED, NUM_PREFILLS = 256, 32, 3
_COLUMNS = "prefill_512,decode_1,decode_8,decode_16,decode_32,mixed_16"

Prompt = list[int]
Request = tuple[Prompt, int]  # a prompt and the number of tokens of its answer


class Peer(Protocol):
    """An engine that decodes greedily and does not stop at an end token."""

    name: str
    vocab_size: int

    def first_token_s(self, prompt: Prompt) -> float:
        """Returns the seconds from the prompt to its first token."""
        ...

    def decode(self, prompts: list[Prompt], num_tokens: int) -> float:
        """Returns the tokens per second of num_tokens steps in which all prompts are decoded."""
        ...

    def answer(self, requests: list[Request]) -> int:
        """Answers all requests, which arrive at once. Returns the number of generated tokens."""
        ...


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model, converted as described above")
    parser.add_argument("--columns", default=_COLUMNS)
    parser.add_argument("--requests", type=Path, help="mixed requests: [[token ids, answer], ...]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def measure(args: argparse.Namespace, load: Callable[[argparse.Namespace], Peer]) -> None:
    """Measures the columns and prints them as JSON in the last line."""
    began = time.perf_counter()
    peer = load(args)
    found: dict[str, object] = {"peer": peer.name, "load_s": time.perf_counter() - began}
    prompts = _Prompts(peer.vocab_size)
    for column in args.columns.split(","):
        name, _, number = column.partition("_")
        if name == "mixed":
            if args.requests is None:
                sys.exit("the column of mixed requests needs --requests FILE")
            found[column] = _mixed(peer, json.loads(args.requests.read_text()))
        elif name == "prefill":
            found[column] = _prefill(peer, prompts, int(number))
        else:
            found[column] = _decode(peer, prompts, int(number))
    sys.stdout.flush()
    print(json.dumps(found), flush=True)


def vocab_size(folder: Path) -> int:
    """Returns the vocabulary's size from the folder's config.json."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


class _Prompts:
    """Random prompts, the same in every run."""

    def __init__(self, vocab_size: int) -> None:
        self._rng, self._size = random.Random(1), vocab_size

    def make(self, length: int) -> Prompt:
        return [self._rng.randrange(self._size) for _ in range(length)]


def _prefill(peer: Peer, prompts: _Prompts, length: int) -> float:
    peer.first_token_s(prompts.make(length))
    taken = [peer.first_token_s(prompts.make(length)) for _ in range(NUM_PREFILLS)]
    return length / statistics.median(taken)


def _decode(peer: Peer, prompts: _Prompts, batch: int) -> float:
    peer.decode([prompts.make(16) for _ in range(batch)], 2)
    return peer.decode([prompts.make(CONTEXT) for _ in range(batch)], NUM_DECODED)


def _mixed(peer: Peer, requests: list[Request]) -> float:
    peer.answer([(requests[0][0][:16], 3)])
    began = time.perf_counter()
    answered = peer.answer(requests)
    seconds = time.perf_counter() - began
    assert answered == sum(number for _, number in requests), f"{answered} tokens"
    return answered / seconds
