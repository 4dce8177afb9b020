"""What the peers' runners share: options, the columns of bench.model, the JSON line.

The runners are scripts for the peer's own virtual environment: they know nothing of this package
(this file lies beside them) and download nothing. A column is measured after a run to warm up;
prefill is the median of three. bench.model adds --columns and --requests to their commands.
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
_LARGEST_TOKEN = 100_000

Prompt = list[int]
Request = tuple[Prompt, int]  # a prompt and how many tokens to answer


class Peer(Protocol):
    """Greedy, without stopping at an end token."""

    name: str

    def first_token_s(self, prompt: Prompt) -> float:
        """Seconds from the prompt to its first token."""
        ...

    def decode(self, prompts: list[Prompt], num_tokens: int) -> float:
        """Tokens per second of num_tokens steps in which all prompts are decoded."""
        ...

    def answer(self, requests: list[Request]) -> int:
        """All requests, handed over at once. Returns the number of tokens answered."""
        ...


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="converted as the description says")
    parser.add_argument("--columns", default=_COLUMNS)
    parser.add_argument("--requests", type=Path, help="mixed requests: [[token ids, answer], ...]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def measure(args: argparse.Namespace, load: Callable[[argparse.Namespace], Peer]) -> None:
    """Prints the JSON line, the last one."""
    began = time.perf_counter()
    peer = load(args)
    found: dict[str, object] = {"peer": peer.name, "load_s": time.perf_counter() - began}
    rng = random.Random(1)
    for column in args.columns.split(","):
        name, _, number = column.partition("_")
        if name == "mixed":
            if args.requests is None:
                sys.exit("mixed requests: --requests FILE, or leave the column out")
            found[column] = _mixed(peer, json.loads(args.requests.read_text()))
        elif name == "prefill":
            found[column] = _prefill(peer, rng, int(number))
        else:
            found[column] = _decode(peer, rng, int(number))
    sys.stdout.flush()
    print(json.dumps(found), flush=True)


def _prompt(rng: random.Random, length: int) -> Prompt:
    return [rng.randrange(_LARGEST_TOKEN) for _ in range(length)]


def _prefill(peer: Peer, rng: random.Random, length: int) -> float:
    peer.first_token_s(_prompt(rng, length))
    taken = [peer.first_token_s(_prompt(rng, length)) for _ in range(NUM_PREFILLS)]
    return length / statistics.median(taken)


def _decode(peer: Peer, rng: random.Random, batch: int) -> float:
    peer.decode([_prompt(rng, 16) for _ in range(batch)], 2)
    return peer.decode([_prompt(rng, CONTEXT) for _ in range(batch)], NUM_DECODED)


def _mixed(peer: Peer, requests: list[Request]) -> float:
    peer.answer([(requests[0][0][:16], 3)])
    began = time.perf_counter()
    answered = peer.answer(requests)
    seconds = time.perf_counter() - began
    assert answered == sum(number for _, number in requests), f"{answered} tokens"
    return answered / seconds
