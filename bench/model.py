"""A whole model against the bound from its bytes and operations: python -m bench.model.

Columns: prefill of 512 tokens (the median of three), decode at batch 1, 8, 16 and 32 from context
256, and 16 mixed requests end to end. The machine's ceilings are read before and after each
measurement, which is repeated, three times at most, when they differ by more than 15 %. With --peer
NAME=COMMAND the command is run between our measurements, with --columns NAMES and --requests FILE
(the mixed ones as JSON) added; its last line must be a JSON object with the same columns, see
bench/peers. By default a random checkpoint of Llama-3.2-1B's shape.
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from bench.checkpoints import random_checkpoint
from ops.native import Ceilings
from serve import Engine, RequestStream, SamplingParams
from serve.models import ModelSpec, read_spec

CONTEXT, NUM_DECODED, NUM_PREFILLS = 256, 32, 3
COLUMNS = ("prefill_512", "decode_1", "decode_8", "decode_16", "decode_32", "mixed_16")
MAX_DRIFT, MAX_REPEATS = 0.15, 3
_READ = 256 << 20
_PROBES = 5


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
    """Our engine; measures each column."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.vocab_size = read_spec(path).vocab_size
        self.engine = Engine(str(path), dtype=dtype, max_model_len=1024, max_num_seqs=32)
        self.rng = random.Random(0)

    async def rate(self, column: str) -> float:
        """Tokens per second."""
        name, _, number = column.partition("_")
        if name == "mixed":
            began = time.perf_counter()
            events = await self._run(*mixed_requests(self.vocab_size))
            return sum(n for _, _, n in events) / (events[-1][0] - began)
        if name == "prefill":
            length = int(number)
            seconds = [await self._prefill_s(length) for _ in range(NUM_PREFILLS)]
            return length / statistics.median(seconds)
        return await self._decode_rate(int(number))

    async def _prefill_s(self, length: int) -> float:
        prompt = _prompt(self.rng, self.vocab_size, length)
        began = time.perf_counter()
        events = await self._run([prompt], [_params(1)])
        return events[0][0] - began

    async def _decode_rate(self, batch: int) -> float:
        prompts = [_prompt(self.rng, self.vocab_size, CONTEXT) for _ in range(batch)]
        # those that come first have a lead of the prompts' steps
        lead = batch * CONTEXT // 256 + 4
        events = await self._run(prompts, [_params(1 + NUM_DECODED + lead)] * batch)
        tokens, seconds = _while_all_decode(events, batch)
        return tokens / seconds

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
    first: dict[int, float] = {}
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


class Ceiling(NamedTuple):
    """Bytes read, int8 and bf16 operations per second; bf16 is 0 without the instruction."""

    read: float
    i8: float
    bf16: float

    @classmethod
    def now(cls, buffer: torch.Tensor) -> Ceiling:
        """Medians of short readings."""
        readings = [_read_ceilings(buffer) for _ in range(_PROBES)]
        return cls(*map(statistics.median, zip(*readings, strict=True)))

    def mean(self, other: Ceiling) -> Ceiling:
        return Ceiling(*map(statistics.mean, zip(self, other, strict=True)))

    def drift(self, other: Ceiling) -> float:
        """The largest relative difference; 0.15 is 15 %."""
        pairs = zip(self, other, strict=True)
        return max((max(pair) / min(pair) - 1 for pair in pairs if min(pair)), default=0.0)


def _read_ceilings(buffer: torch.Tensor) -> Ceiling:
    began = time.perf_counter()
    Ceilings.read(buffer)
    middle = time.perf_counter()
    i8 = Ceilings.multiply_i8(500_000)
    later = time.perf_counter()
    bf16 = Ceilings.multiply_bf16(500_000)
    end = time.perf_counter()
    return Ceiling(buffer.numel() / (middle - began), i8 / (later - middle), bf16 / (end - later))


class Measured(NamedTuple):
    """ceiling: the mean of before and after; drift: how far they are apart."""

    rate: float
    ceiling: Ceiling
    drift: float


async def steady(run: Callable[[], Awaitable[float]], probe: Callable[[], Ceiling]) -> Measured:
    """Between two readings of the ceilings that agree; if none do, where they differed least."""
    tries: list[Measured] = []
    for _ in range(1 + MAX_REPEATS):
        before = probe()
        rate = await run()
        after = probe()
        tries.append(Measured(rate, before.mean(after), before.drift(after)))
        if tries[-1].drift <= MAX_DRIFT:
            break
    return min(tries, key=lambda found: found.drift)


def run_peer(command: str, columns: list[str], requests: Path) -> dict[str, Any]:
    options = ["--columns", ",".join(columns), "--requests", str(requests)]
    done = subprocess.run([*shlex.split(command), *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Tally:
    """What the rounds brought. Lists by peer ("ours" is one) and column."""

    def __init__(self) -> None:
        self.rates: dict[str, dict[str, list[float]]] = {}
        self.shares: dict[str, list[float]] = {}
        self.drifts: dict[str, list[float]] = {}
        self.ceilings: dict[str, list[Ceiling]] = {}

    def add(self, name: str, column: str, rate: float) -> None:
        self.rates.setdefault(name, {}).setdefault(column, []).append(rate)

    def summary(self) -> dict[str, Any]:
        """Medians. unreliable: columns whose ceilings did not hold still."""
        shares, drifts = _medians(self.shares), _medians(self.drifts)
        return {
            "tokens_per_s": {name: _medians(found) for name, found in self.rates.items()},
            "share_of_bound": shares,
            "unreliable": [c for c in shares if shares[c] > 1 or drifts[c] > MAX_DRIFT],
            "ceilings": {
                name: Ceiling(*map(statistics.median, zip(*found, strict=True)))._asdict()
                for name, found in self.ceilings.items()
            },
        }


async def measure(
    path: Path, *, dtype: str, columns: list[str], rounds: int, peers: dict[str, str]
) -> dict[str, Any]:
    """Rounds of all columns, ours and then the peers'; medians."""
    began = time.perf_counter()
    ours, spec, tally = Ours(path, dtype), read_spec(path), Tally()
    buffer = torch.ones(_READ, dtype=torch.uint8)
    probe = partial(Ceiling.now, buffer)
    async with ours.engine as engine:
        await engine.generate([1, 2, 3], _params(1))
        start_s = time.perf_counter() - began
        model = Model(spec, engine.stats().kv_bytes_per_token)
        for _ in range(rounds):
            for column in columns:
                found = await steady(partial(ours.rate, column), probe)
                work = _work(model, column, spec.vocab_size)
                share = work.bound_s(*found.ceiling) * found.rate / work.tokens
                tally.add("ours", column, found.rate)
                tally.shares.setdefault(column, []).append(share)
                tally.drifts.setdefault(column, []).append(found.drift)
                tally.ceilings.setdefault("ours", []).append(found.ceiling)
            _peers_round(tally, peers, columns, probe, spec.vocab_size)
    return {"model": path.name, "start_s": start_s, **tally.summary()}


def _peers_round(
    tally: Tally,
    peers: dict[str, str],
    columns: list[str],
    probe: Callable[[], Ceiling],
    vocab_size: int,
) -> None:
    """Each once, in a process of its own, between two readings of the ceilings."""
    prompts, params = mixed_requests(vocab_size)
    pairs = [[prompt, p.max_tokens] for prompt, p in zip(prompts, params, strict=True)]
    with TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.json"
        requests.write_text(json.dumps(pairs))
        for name, command in peers.items():
            before = probe()
            found = run_peer(command, columns, requests)
            tally.ceilings.setdefault(name, []).append(before.mean(probe()))
            for column in columns:
                if found.get(column) is not None:
                    tally.add(name, column, float(found[column]))


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
    shares, unreliable = result["share_of_bound"], result["unreliable"]
    cells = (f"{shares[c]:.0%}{' (unreliable)' if c in unreliable else ''}" for c in columns)
    table.add_row("share of the bound", *cells)
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
    _report_ceilings(result["ceilings"], console)
    print(json.dumps(result))


def _report_ceilings(ceilings: dict[str, dict[str, float]], console: Console) -> None:
    """A peer that ran on another machine, so to speak, is not to be compared."""
    ours = Ceiling(**ceilings["ours"])
    for name, found in ceilings.items():
        line = f"beside {name}: {found['read'] / 1e9:.0f} GB/s, {found['i8'] / 1e12:.2f} TOP/s"
        if ours.drift(Ceiling(**found)) > MAX_DRIFT:
            line += "  [yellow]differs from ours by more than 15 %: compare with care[/yellow]"
        console.print(line, highlight=False)


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
