"""`serve bench latency`: measures a model's steps and compares them with their bound and peers.

A decode step has one row of each of `batch` sequences and no other rows. The sequences begin with a
given context, and step times are those of the engine's trace. Prefill is the time from the
submission of a prompt to its first token. The last measurement runs 16 mixed requests from end to
end.

The rule is the same for our engine and for every mode of every peer: in each round each column is
measured once, between two readings of the machine's ceilings, and again, up to three times, if
these differ by more than 15 %. A short task of the same shape, which does not count, warms a column
up. All engines get the same prompts. A peer that fails keeps what it has measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.common.ceilings import Ceiling, Measured, probe_for, steady
from bench.common.model_cost import Drawn, ModelCost
from bench.offline.peers import PeerError, PeerProcess, Skipped, TaskError
from bench.offline.routings import RoutingLog
from bench.offline.tally import OURS, Tally
from bench.offline.tasks import Shape, Task, lead, make_task, warm_up_of
from serve import Engine, RequestStream, SamplingParams
from serve.engine.step_trace import TracedStep
from serve.machine import usable_processors
from serve.models import read_spec

Advance = Callable[[str], None]
Keep = Callable[[Tally, float], None]
_DECODE_TRIES = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """One measurement. rate is in tokens per second, seconds are those of each step or prompt,
    steps are the traced steps, for which a bound can be computed, and drawn the experts of each, if
    they are known."""

    rate: float
    seconds: list[float]
    steps: Sequence[TracedStep] = ()
    drawn: Sequence[Drawn] | None = None


class Model:
    """Measures tasks with a started engine. routings: notes the experts of a mixture."""

    def __init__(self, engine: Engine, routings: RoutingLog) -> None:
        self._engine, self._routings = engine, routings

    async def measure(self, task: Task) -> Timed:
        self._routings.clear()
        if task.kind == "mixed":
            return await self._mixed(task)
        if task.kind == "prefill":
            return await self._prefill(task)
        return await self._decode(task)

    async def _mixed(self, task: Task) -> Timed:
        trace = self._engine.trace_steps()
        began = time.perf_counter()
        tokens = await self._run(list(zip(task.prompts, task.answers, strict=True)))
        seconds = time.perf_counter() - began
        assert tokens == task.num_tokens, f"{tokens} tokens"
        steps = list(trace.steps)
        return Timed(tokens / seconds, [seconds], steps, self._routings.drawn(steps))

    async def _prefill(self, task: Task) -> Timed:
        trace = self._engine.trace_steps()
        seconds = []
        for prompt in task.prompts:
            began = time.perf_counter()
            await self._run([(prompt, 1)])
            seconds.append(time.perf_counter() - began)
        steps, rate = list(trace.steps), task.num_tokens / statistics.median(seconds)
        return Timed(rate, seconds, steps, self._routings.drawn(steps))

    async def _decode(self, task: Task) -> Timed:
        """Measures again, a few times, if a prompt came too late for as many common steps: a busy
        machine may delay the tokenizer's threads."""
        for _ in range(_DECODE_TRIES):
            timed = await self._try_decode(task)
            if timed is not None:
                return timed
        raise AssertionError("too few steps decoded all sequences: lead() is too small")

    async def _try_decode(self, task: Task) -> Timed | None:
        """Returns None if too few steps decoded all sequences."""
        self._routings.clear()
        trace = self._engine.trace_steps()
        batch, num_steps = len(task.prompts), task.answers[0]
        answer = 1 + num_steps + lead(batch, len(task.prompts[0]))
        await self._run([(prompt, answer) for prompt in task.prompts])
        traced = list(trace.steps)
        full = [
            number
            for number, step in enumerate(traced)
            if step.work.num_decodes == step.work.num_rows == batch
        ]
        # the first one follows a step with prompt rows, which may have warmed its caches
        taken = full[1 : 1 + num_steps]
        steps = [traced[number] for number in taken]
        if task.is_warm_up:  # its few tokens may end before the last prompt has arrived
            return Timed(0.0, [])
        if len(steps) < num_steps:
            return None
        seconds = [step.ended_s - step.began_s for step in steps]
        drawn = self._routings.drawn(traced)
        if drawn is not None:
            drawn = [drawn[number] for number in taken]
        return Timed(batch * len(steps) / sum(seconds), seconds, steps, drawn)

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


async def measure_peer(process: PeerProcess, mode: str, task: Task) -> Timed:
    """Measures a task with a peer. Raises PeerError and Skipped."""
    seconds = process.seconds(mode, task)
    taken = statistics.median(seconds) if task.kind == "prefill" else sum(seconds)
    return Timed(task.num_tokens / taken, seconds)


class Rounds:
    """Measures all engines round by round.

    make: returns a new engine of ours. are_apart: no peer runs beside it, so that it is loaded
    again in each round, for models of which memory has room for one.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        shape: Shape,
        peers: dict[str, str],
        advance: Advance,
        *,
        are_apart: bool = False,
    ) -> None:
        self.tally = Tally()
        self.start_s = 0.0
        self._make, self._shape, self._peers, self._advance = make, shape, peers, advance
        self._are_apart = are_apart
        self._engine = engine = make()
        self._config = config = engine.config
        self._spec = read_spec(config.model_path)
        self._threads = config.compute_threads or usable_processors()
        self._probe: Callable[[], Ceiling] | None = None
        self._warm: set[tuple[str, str, str]] = set()

    async def run_all(self, rounds: int, keep: Keep) -> None:
        """Runs all rounds; keep(figures so far, seconds from the engine's start to its first
        token) is called after each."""
        async with contextlib.AsyncExitStack() as stack:
            if not self._are_apart:
                await stack.enter_async_context(self._started())
            for number in range(rounds):
                await self.run(number)
                keep(self.tally, self.start_s)

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        began = time.perf_counter()
        async with self._engine as engine:
            await engine.generate(
                [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            )
            self.start_s = self.start_s or time.perf_counter() - began
            kv_bytes = engine.stats().kv_bytes_per_token
            self._cost = ModelCost.of(self._config, self._spec, kv_bytes)
            self._routings = RoutingLog(len(self._cost.mixtures))
            if self._probe is None:  # its memory is like the engine's, whose start says how
                self._probe = probe_for(self._config, self._spec)
            yield

    async def run(self, number: int) -> None:
        """Runs one round. Each begins with another engine."""
        if self._peers:  # their processes are new in each round, so all are warmed up again
            self._warm.clear()
        names = [OURS, *self._peers]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name == OURS:
                await self._ours(number)
            elif not self.tally.has_failed(name):
                await self._peer(name, number)

    async def _ours(self, number: int) -> None:
        if not self._are_apart:
            await self._columns(number)
            return
        self._advance("loading")
        async with self._started():
            await self._columns(number)
        self._engine = self._make()  # the old one and its weights are freed

    async def _columns(self, number: int) -> None:
        model = Model(self._engine, self._routings)
        for column in self._shape.columns:
            self._advance(column)
            with self._routings.recording():
                found = await self._steady((OURS, "", column), number, model.measure)
            timed = found.value
            self.tally.add(OURS, column, "", timed.rate, found.ceiling, found.drift)
            self.tally.seconds.setdefault(column, []).extend(timed.seconds)
            bound_s = self._cost.bound_s(timed.steps, found.ceiling, timed.drawn)
            self._note_experts(column, timed)
            self.tally.shares.setdefault(column, []).append(bound_s / sum(timed.seconds))

    def _note_experts(self, column: str, timed: Timed) -> None:
        """Notes how many experts of a layer decode steps drew, and draw if they do so evenly."""
        mixtures = self._cost.mixtures
        if not mixtures or timed.drawn is None or not column.startswith("decode"):
            return
        rows = timed.steps[0].work.num_rows
        drawn = statistics.mean(itertools.chain.from_iterable(timed.drawn))
        even = statistics.mean(each.drawn(rows) for each in mixtures)
        self.tally.experts.setdefault(column, []).append((drawn, even))

    async def _peer(self, name: str, number: int) -> None:
        """Runs all modes of a peer in a process of this round."""
        where = "start"
        try:
            with PeerProcess(self._peers[name], self._shape, self._threads) as process:
                self.tally.titles[name] = process.title
                for mode in process.modes:
                    for column in self._shape.columns:
                        where = f"{mode}, {column.replace('_', ' ')}"
                        self._advance(f"{name}, {where}")
                        if not self.tally.has_failed(name, where):
                            await self._peer_column(process, name, mode, column, number, where)
        except PeerError as error:  # its process has ended or does not answer
            self.tally.fail(name, "", f"{error} ({where})")

    async def _peer_column(
        self, process: PeerProcess, name: str, mode: str, column: str, number: int, where: str
    ) -> None:
        try:
            found = await self._steady(
                (name, mode, column), number, partial(measure_peer, process, mode)
            )
        except Skipped:
            return
        except TaskError as error:
            self.tally.fail(name, where, str(error))
            return
        self.tally.add(name, column, mode, found.value.rate, found.ceiling, found.drift)

    async def _steady(
        self, key: tuple[str, str, str], number: int, run: Callable[[Task], Awaitable[Timed]]
    ) -> Measured[Timed]:
        """Measures a column after a warm-up. Every engine gets the same prompts in the same round
        and repetition."""
        repetitions = itertools.count()

        def task(repetition: object) -> Task:
            seed = (number, repetition)
            return make_task(key[2], self._shape, self._spec.vocab_size, seed)

        if key not in self._warm:
            self._warm.add(key)
            await run(warm_up_of(task("warm-up")))
        assert self._probe is not None, "the first round begins with our engine"
        return await steady(lambda: run(task(next(repetitions))), self._probe)
