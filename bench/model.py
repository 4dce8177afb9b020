"""A whole model against the bound from its bytes and operations: python -m bench.model.

Columns: prefill of 512 tokens, decode at batch 1, 8, 16 and 32 from context 256, and 16 mixed
requests end to end. The machine's ceilings are read before and after each measurement. With
--peer NAME=COMMAND the command is run between our measurements; its last line must be a JSON
object with the same columns. By default a random checkpoint of Llama-3.2-1B's shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from bench.checkpoints import random_checkpoint
from ops.native import Ceilings
from serve import Engine, RequestStream, SamplingParams
from serve.models import ModelSpec, read_spec

CONTEXT, NUM_DECODED = 256, 32
COLUMNS = ("prefill_512", "decode_1", "decode_8", "decode_16", "decode_32", "mixed_16")
_READ = 256 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """What a column must do at least, in its whole."""

    tokens: int
    read_bytes: float
    operations_i8: float
    operations_attention: float

    def bound_s(self, read: float, i8: float, bf16: float) -> float:
        """Reading and multiplying overlap at best. Rates per second."""
        compute = self.operations_i8 / i8 + (self.operations_attention / bf16 if bf16 else 0.0)
        return max(self.read_bytes / read, compute)


class Model:
    """Sizes of the products and of the K/V, from config.json."""

    def __init__(self, spec: ModelSpec, kv_bytes: int) -> None:
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        mlp = (3 if spec.is_gated else 2) * spec.hidden_size * spec.intermediate_size
        self.block_weights = spec.num_layers * (spec.hidden_size * (2 * q + 2 * kv) + mlp)
        self.head_weights = spec.vocab_size * spec.hidden_size
        self.kv_bytes = kv_bytes
        self.attention_width = 4 * q * spec.num_layers  # operations per query row and key

    def prefill(self, length: int) -> Work:
        return Work(
            length,
            self.block_weights + self.head_weights,
            2.0 * (self.block_weights * length + self.head_weights),
            self.attention_width * length * (length + 1) / 2,
        )

    def decode(self, batch: int) -> Work:
        """One step in the middle of the decoding."""
        keys = batch * (CONTEXT + NUM_DECODED / 2)
        weights = self.block_weights + self.head_weights
        return Work(
            batch,
            weights + keys * self.kv_bytes,
            2.0 * weights * batch,
            self.attention_width * keys,
        )


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _prompt(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


Event = tuple[float, int, int]  # when, which request, how many tokens


class Ours:
    """Our engine; measures (tokens, seconds) of each column."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.vocab_size = read_spec(path).vocab_size
        self.engine = Engine(str(path), dtype=dtype, max_model_len=1024, max_num_seqs=32)
        self.rng = random.Random(0)

    async def column(self, column: str) -> tuple[int, float]:
        name, _, number = column.partition("_")
        if name == "mixed":
            began = time.perf_counter()
            events = await self._run(*mixed_requests(self.vocab_size))
            return sum(n for _, _, n in events), events[-1][0] - began
        if name == "prefill":
            prompt = _prompt(self.rng, self.vocab_size, int(number))
            began = time.perf_counter()
            events = await self._run([prompt], [_params(1)])
            return int(number), events[0][0] - began
        batch = int(number)
        prompts = [_prompt(self.rng, self.vocab_size, CONTEXT) for _ in range(batch)]
        # those that come first have a lead of the prompts' steps
        lead = batch * CONTEXT // 512 + 4
        events = await self._run(prompts, [_params(1 + NUM_DECODED + lead)] * batch)
        return _while_all_decode(events, batch)

    async def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Event]:
        events: list[Event] = []

        async def consume(index: int, stream: RequestStream) -> None:
            async for delta in stream:
                events.append((time.perf_counter(), index, len(delta.token_ids)))

        streams = [self.engine.submit(p, q) for p, q in zip(prompts, params, strict=True)]
        await asyncio.gather(*(consume(i, stream) for i, stream in enumerate(streams)))
        return events


def _while_all_decode(events: list[Event], batch: int) -> tuple[int, float]:
    """Tokens and seconds from the last request's first token to the last token before one ends."""
    first = {}
    for when, index, _ in events:
        first.setdefault(index, when)
    last = {index: when for when, index, _ in events}
    start, end = max(first.values()), min(last.values())
    assert len(first) == batch and start < end, "the lead was too short"
    return sum(n for when, _, n in events if start < when <= end), end - start


def mixed_requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """16 prompts of 16 to 512 tokens with 16 to 128 tokens to answer, always the same."""
    rng = random.Random(16)
    prompts = [_prompt(rng, vocab_size, rng.randint(16, 512)) for _ in range(16)]
    return prompts, [_params(rng.randint(16, 128)) for _ in range(16)]


def _mixed_work(model: Model, vocab_size: int) -> Work:
    """At best every step has all 16 sequences, and the longest answer sets their number."""
    prompts, params = mixed_requests(vocab_size)
    answers = [p.max_tokens or 0 for p in params]
    rows = sum(map(len, prompts)) + sum(answers)
    steps = max(answers)
    weights = model.block_weights + model.head_weights
    return Work(
        sum(answers),
        steps * weights,
        2.0 * (model.block_weights * rows + model.head_weights * sum(answers)),
        0.0,
    )


@contextmanager
def _ceilings(buffer: torch.Tensor, out: list[tuple[float, float, float]]) -> Iterator[None]:
    out.append(_read_ceilings(buffer))
    yield
    out.append(_read_ceilings(buffer))


def _read_ceilings(buffer: torch.Tensor) -> tuple[float, float, float]:
    began = time.perf_counter()
    Ceilings.read(buffer)
    middle = time.perf_counter()
    i8 = Ceilings.multiply_i8(500_000)
    later = time.perf_counter()
    bf16 = Ceilings.multiply_bf16(500_000)
    end = time.perf_counter()
    return buffer.numel() / (middle - began), i8 / (later - middle), bf16 / (end - later)


def run_peer(command: str) -> dict[str, Any]:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


async def measure(
    path: Path, *, dtype: str, columns: list[str], rounds: int, peers: dict[str, str]
) -> dict[str, Any]:
    """Rounds of all columns, ours and then the peers'; medians."""
    began = time.perf_counter()
    ours, spec = Ours(path, dtype), read_spec(path)
    rates: dict[str, dict[str, list[float]]] = {"ours": {c: [] for c in columns}}
    shares: dict[str, list[float]] = {c: [] for c in columns}
    rates |= {name: {c: [] for c in columns} for name in peers}
    buffer = torch.ones(_READ, dtype=torch.uint8)
    async with ours.engine as engine:
        await engine.generate([1, 2, 3], _params(1))
        start_s = time.perf_counter() - began
        model = Model(spec, engine.stats().kv_bytes_per_token)
        for _ in range(rounds):
            for column in columns:
                read: list[tuple[float, float, float]] = []
                with _ceilings(buffer, read):
                    tokens, seconds = await ours.column(column)
                work = _work(model, column, spec.vocab_size)
                limits = [statistics.mean(pair) for pair in zip(*read, strict=True)]
                rate = tokens / seconds
                rates["ours"][column].append(rate)
                shares[column].append(work.bound_s(*limits) * rate / work.tokens)
            for name, command in peers.items():
                found = run_peer(command)
                for column in columns:
                    if found.get(column) is not None:
                        rates[name][column].append(float(found[column]))
    return {
        "model": path.name,
        "start_s": start_s,
        "tokens_per_s": {n: _medians(r) for n, r in rates.items()},
        "share_of_bound": _medians(shares),
    }


def _work(model: Model, column: str, vocab_size: int) -> Work:
    if column == "mixed_16":
        return _mixed_work(model, vocab_size)
    name, _, number = column.partition("_")
    return model.prefill(int(number)) if name == "prefill" else model.decode(int(number))


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in values.items() if found}


def report(result: dict[str, Any], columns: list[str]) -> None:
    table = Table("tokens/s", *columns)
    for name, found in result["tokens_per_s"].items():
        table.add_row(name, *(f"{found[c]:,.0f}" if c in found else "" for c in columns))
    shares = result["share_of_bound"]
    table.add_row("share of the bound", *(f"{shares[c]:.0%}" for c in columns))
    peers = [found for name, found in result["tokens_per_s"].items() if name != "ours"]
    if peers:
        ours = result["tokens_per_s"]["ours"]
        best = {c: max((p[c] for p in peers if c in p), default=0.0) for c in columns}
        cells = (f"{ours[c] / best[c]:.2f}x" if best[c] else "" for c in columns)
        table.add_row("over the best peer", *cells)
    console = Console()
    console.width = max(console.width, 110)
    console.print(f"{result['model']}: first token after {result['start_s']:.1f} s")
    console.print(table)
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint directory")
    parser.add_argument("--shape", default="llama-1b", help="of the random checkpoint otherwise")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    args = parser.parse_args()
    path = args.model or random_checkpoint(args.shape)
    peers = dict(item.split("=", 1) for item in args.peer)
    columns = args.columns.split(",")
    unknown = set(columns) - set(COLUMNS)
    if unknown:
        sys.exit(f"unknown columns: {', '.join(sorted(unknown))}")
    measured = measure(path, dtype=args.dtype, columns=columns, rounds=args.rounds, peers=peers)
    result = uvloop.run(measured)
    report(result, columns)


if __name__ == "__main__":
    main()
