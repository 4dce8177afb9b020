"""`serve bench latency`: measures a model's steps and compares them with their bound and peers.

A decode step has one row of each of `batch` sequences and no other rows. The sequences begin with a
given context, and step times are those of the engine's trace. Prefill is the time from the
submission of a prompt to its first token. The last measurement runs 16 mixed requests from end to
end and is compared with peers. The machine's ceilings are measured before and after each
measurement, which is repeated up to three times if they differ by more than 15 %.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.common.ceilings import (
    MAX_DRIFT,
    Ceiling,
    Measured,
    ModelCost,
    Probe,
    probe_for,
    steady,
)
from bench.load.results.metrics import percentile
from bench.load.workload.work import Work
from bench.offline.peers import run_peer
from serve import Engine, RequestStream, SamplingParams
from serve.engine.step_trace import TracedStep

MIXED = "mixed_16"
_PEER_BATCH = 32  # the batch that the runners in bench/peers configure
_PEER_CONTEXT = 256
_ROWS = 256  # the default row budget of a step
_LEAD = 4  # additional steps


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured: `steps` decode steps at each batch from `context` tokens on, num_prefills
    prefills of each length and, with has_mixed, the mixed requests."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prefills: tuple[int, ...]
    num_prefills: int
    has_mixed: bool

    @property
    def columns(self) -> list[str]:
        names = [f"prefill_{length}" for length in self.prefills]
        names += [f"decode_{batch}" for batch in self.batches]
        return names + [MIXED] * self.has_mixed

    @property
    def peer_columns(self) -> list[str]:
        left_out = {f"decode_{batch}" for batch in self.batches if batch > _PEER_BATCH}
        return [name for name in self.columns if name not in left_out]

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sequence in any measurement."""
        decoding = self.context + self.steps + lead(max(self.batches, default=1), self.context) + 2
        mixed = 640 if self.has_mixed else 0
        return max(decoding, mixed, *(length + 1 for length in self.prefills), 1)


def lead(batch: int, context: int) -> int:
    """Returns an upper bound of the steps until the last of `batch` prompts has its first token."""
    return -(-batch * context // (_ROWS // 2)) + _LEAD


@dataclass(frozen=True, slots=True)
class Timed:
    """One measurement. rate is in tokens per second, seconds are those of each step or prompt, and
    steps are the traced steps, for which a bound can be computed."""

    rate: float
    seconds: list[float]
    steps: list[TracedStep]


class Model:
    """Measures columns with a started engine."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine = engine
        self._shape = shape
        self._rng = random.Random(0)
        self.vocab_size = engine.spec.vocab_size

    async def measure(self, column: str) -> Timed:
        name, _, number = column.partition("_")
        if name == "mixed":
            return await self._mixed()
        if name == "prefill":
            return await self._prefill(int(number))
        return await self._decode(int(number))

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(self.vocab_size) for _ in range(length)]

    async def _mixed(self) -> Timed:
        trace = self._engine.trace_steps()
        works = mixed_requests(self.vocab_size)
        began = time.perf_counter()
        tokens = await self._run([(w.token_ids or [], w.max_tokens or 1) for w in works])
        seconds = time.perf_counter() - began
        return Timed(tokens / seconds, [seconds], list(trace.steps))

    async def _prefill(self, length: int) -> Timed:
        trace = self._engine.trace_steps()
        seconds = []
        for _ in range(self._shape.num_prefills):
            prompt = self._prompt(length)
            began = time.perf_counter()
            await self._run([(prompt, 1)])
            seconds.append(time.perf_counter() - began)
        return Timed(length / statistics.median(seconds), seconds, list(trace.steps))

    async def _decode(self, batch: int) -> Timed:
        trace = self._engine.trace_steps()
        answer = 1 + self._shape.steps + lead(batch, self._shape.context)
        await self._run([(self._prompt(self._shape.context), answer)] * batch)
        full = [
            step for step in trace.steps if step.work.num_decodes == step.work.num_rows == batch
        ]
        # the first one follows a step with prompt rows, which may have warmed its caches
        steps = full[1 : 1 + self._shape.steps]
        assert len(steps) == self._shape.steps, "lead() is too small"
        seconds = [step.ended_s - step.began_s for step in steps]
        return Timed(batch * len(steps) / sum(seconds), seconds, steps)

    async def _run(self, requests: Sequence[tuple[list[int], int]]) -> int:
        """Sends all requests (prompt, max_tokens) at once and returns the number of tokens."""

        async def consume(stream: RequestStream) -> int:
            return sum([len(delta.token_ids) async for delta in stream])

        streams = [
            self._engine.submit(
                prompt, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            )
            for prompt, answer in requests
        ]
        return sum(await asyncio.gather(*map(consume, streams)))


def mixed_requests(vocab_size: int) -> list[Work]:
    """Returns 16 prompts of 16 to 512 tokens with answers of 16 to 128, always the same."""
    rng = random.Random(16)
    lengths = [rng.randint(16, 512) for _ in range(16)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [
        Work(token_ids=prompt, max_tokens=rng.randint(16, 128), ignore_eos=True)
        for prompt in prompts
    ]


class Tally:
    """The figures of all rounds, as lists by engine ("ours" and peers) and column."""

    def __init__(self) -> None:
        self.rates: dict[str, dict[str, list[float]]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.shares: dict[str, list[float]] = {}
        self.drifts: dict[str, list[float]] = {}
        self.ceilings: dict[str, list[Ceiling]] = {}

    def add(self, name: str, column: str, rate: float) -> None:
        self.rates.setdefault(name, {}).setdefault(column, []).append(rate)

    def add_ours(self, column: str, measured: Measured[Timed], cost: ModelCost) -> None:
        timed = measured.value
        self.add("ours", column, timed.rate)
        self.seconds.setdefault(column, []).extend(timed.seconds)
        bound_s = cost.bound_s(timed.steps, measured.ceiling)
        self.shares.setdefault(column, []).append(bound_s / sum(timed.seconds))
        self.drifts.setdefault(column, []).append(measured.drift)
        self.ceilings.setdefault("ours", []).append(measured.ceiling)

    def unreliable(self) -> list[str]:
        """Returns the columns that exceed their bound or during which the ceilings drifted."""
        shares, drifts = medians(self.shares), medians(self.drifts)
        return [c for c in shares if shares[c] > 1 or drifts[c] > MAX_DRIFT]

    def summary(self) -> dict[str, object]:
        """Returns medians over the rounds, and percentiles over all their steps or prompts."""
        return {
            "tokens_per_s": {name: medians(values) for name, values in self.rates.items()},
            "rounds": self.rates,
            "ms": {
                column: {f"p{p}": 1e3 * percentile(seconds, p) for p in (50, 99)}
                for column, seconds in self.seconds.items()
            },
            "share_of_bound": medians(self.shares),
            "unreliable": self.unreliable(),
            "ceilings": {
                name: Ceiling(*map(statistics.median, zip(*values, strict=True)))._asdict()
                for name, values in self.ceilings.items()
            },
        }


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items() if each}


async def measure(
    engine: Engine,
    shape: Shape,
    *,
    rounds: int,
    peers: dict[str, str],
    advance: Callable[[str], None],
) -> tuple[Tally, float]:
    """Measures all columns and all peers in each round. Returns the figures, and the seconds from
    the engine's start to its first token. Calls advance(name) before each column and peer."""
    began = time.perf_counter()
    tally = Tally()
    async with engine:
        await engine.generate(
            [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        )
        start_s = time.perf_counter() - began
        probe = probe_for(engine.config, engine.spec)
        cost = ModelCost.of(engine.config, engine.spec, engine.stats().kv_bytes_per_token)
        model = Model(engine, shape)
        for _ in range(rounds):
            for column in shape.columns:
                advance(column)
                measured = await steady(partial(model.measure, column), probe)
                tally.add_ours(column, measured, cost)
            for name, command in peers.items():
                advance(name)
                for column, rate in _peer_round(tally, name, command, shape, probe, model):
                    tally.add(name, column, rate)
    return tally, start_s


def _peer_round(
    tally: Tally, name: str, command: str, shape: Shape, probe: Probe, model: Model
) -> Iterator[tuple[str, float]]:
    """Runs a peer once, in a separate process and between two readings of the ceilings. Yields its
    columns and rates."""
    before = probe()
    rates = run_peer(command, shape.peer_columns, mixed_requests(model.vocab_size))
    tally.ceilings.setdefault(name, []).append(before.mean(probe()))
    for column in shape.peer_columns:
        if rates.get(column) is not None:
            yield column, float(rates[column])


def needs_peer_shape(shape: Shape) -> bool:
    """Returns whether the shape is the one that the runners in bench/peers measure."""
    return (shape.context, shape.steps) == (_PEER_CONTEXT, 32)
