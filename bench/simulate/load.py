"""Runs a load through a simulated engine, from requests and arrival times to a run's result."""

from __future__ import annotations

import collections.abc as abc
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.load.client.record import Outcome, Progress, Record, RunResult
from bench.load.workload.work import Call
from bench.plan.cost import StepCost
from bench.plan.pipeline import StageCost
from bench.simulate.engine import OTHER, SimulatedEngine, VirtualEngine, make_sequence
from bench.simulate.keep import MOST_CHUNKS, RunRecorder
from bench.simulate.settings import SimulationSettings
from bench.simulate.stages import PipelinedEngine
from serve.engine.early_rejection import EarlyRejection
from serve.errors import OverloadedError
from serve.request import Request
from serve.sampling_params import SamplingParams

_REPORT_STEPS = 4096  # between two reports of the progress

OnProgress = Callable[[Progress], None]


def simulate(
    calls: abc.Sequence[Call],
    arrivals_s: abc.Sequence[float],
    cost: StepCost | StageCost,
    settings: SimulationSettings,
    *,
    qps: float | None = None,
    seed: int = 0,
    warmup_s: float = 0.0,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Runs every request to its end, which without num_output is max_tokens or the context's end.

    calls[i] arrives arrivals_s[i] seconds after the start; arrivals_s ascend. qps is the nominal
    rate, by default that of arrivals_s. warmup_s seconds at the beginning do not count.
    on_progress is called every few thousand steps with simulated seconds. Raises ConfigError for
    settings that contradict each other.
    """
    load = LoadSimulation(calls, arrivals_s, cost, settings)
    load.run(on_progress)
    if qps is None:
        qps = len(calls) / arrivals_s[-1] if calls and arrivals_s[-1] > 0 else math.inf
    result = load.result(qps, seed)
    result.window = (warmup_s, result.window[1])
    return result


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns garbage collection off, because it is slow with many objects and a simulation creates
    few reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LoadSimulation:
    """Runs a load as serve/engine/core.py does: requests arrive as messages between two steps."""

    def __init__(
        self,
        calls: abc.Sequence[Call],
        arrivals_s: abc.Sequence[float],
        cost: StepCost | StageCost,
        settings: SimulationSettings,
    ) -> None:
        self.is_fast = True  # runs steps that repeat the last one without the scheduler
        self._calls = calls
        self._arrivals_s = arrivals_s
        self._settings = settings
        self.scheduler = settings.make_scheduler(has_prefixes=any(call.runs for call in calls))
        scheduler = self.scheduler
        self._engine: VirtualEngine
        if isinstance(cost, StageCost):
            self._engine = PipelinedEngine(scheduler, cost)
        else:
            self._engine = SimulatedEngine(scheduler, cost)
        self._recorder = RunRecorder(
            scheduler,
            len(calls),
            keeps_chunks=sum(call.num_output or 0 for call in calls) <= MOST_CHUNKS,
        )
        slo_s = settings.engine.ttft_slo
        self._rejection = None if slo_s is None else EarlyRejection(scheduler, slo_s)
        self._num_unfinished = 0
        self._refused: dict[int, str] = {}
        self._params: dict[int, SamplingParams] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._runs: dict[int, int] = {}

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Runs until the last request has finished."""
        with _without_collections():
            self._run(on_progress)

    def _run(self, on_progress: OnProgress | None) -> None:
        engine, scheduler, recorder = self._engine, self.scheduler, self._recorder
        delays = self._settings.delays
        due = sorted(
            (at_s + delays.before(call.num_prompt), number)
            for number, (at_s, call) in enumerate(zip(self._arrivals_s, self._calls, strict=True))
        )
        index, count = 0, len(due)
        while True:
            while index < count and due[index][0] <= engine.now_s:
                self._queue(due[index][1])
                index += 1
            if not scheduler.has_work():
                if index == count:
                    break
                engine.now_s = due[index][0]  # the next message wakes up an idle engine
                continue
            finished = engine.step(recorder.watch)
            if finished is None:
                assert scheduler.running, "work, but nothing can be scheduled"
                continue
            for sequence in finished:
                recorder.ended(sequence, engine.now_s)
            self._num_unfinished -= len(finished)
            if self.is_fast:
                engine.forward(recorder.watch, due[index][0] if index < count else math.inf)
            if on_progress is not None and recorder.num_steps % _REPORT_STEPS == 0:
                on_progress(self._progress(index))
        if on_progress is not None:
            on_progress(self._progress(index))

    def _progress(self, num_sent: int) -> Progress:
        return Progress(
            self._engine.now_s,
            len(self._calls),
            num_sent=num_sent,
            num_done=self.scheduler.num_finished + len(self._refused),
            num_failed=len(self._refused),
            num_running=self._num_unfinished,
        )

    # ---- requests

    def _queue(self, number: int) -> None:
        """Checks a request as serve/engine/preprocessor.py and request_limits.py do, and queues
        it."""
        call, engine = self._calls[number], self._settings.engine
        longest = self._settings.max_model_len
        room = longest - call.num_prompt
        if call.num_prompt < 1 or room < (1 if call.max_tokens is None else call.max_tokens):
            self._refused[number] = "context_length_exceeded: prompt and max_tokens"
            return
        limit = engine.max_num_waiting + engine.max_num_seqs
        if self._num_unfinished and self._num_unfinished >= limit:
            self._refused[number] = "overloaded: too many are running or waiting"
            return
        max_tokens = room if call.max_tokens is None else call.max_tokens
        params = self._params.get(max_tokens)
        if params is None:
            params = self._params[max_tokens] = SamplingParams(max_tokens=max_tokens, seed=0)
        arrival_s = self._arrivals_s[number]
        prompt = self._prompt(number, call)
        request = Request(str(number), None, prompt, params, arrival_s, call.client)
        sequence = make_sequence(request)
        prefixes = self.scheduler.prefixes
        if prefixes.is_on:
            sequence.page_keys = prefixes.page_keys(request)
            sequence.num_expected_rows = prefixes.num_missing_rows(request, sequence.page_keys)
        if self._rejection is not None:
            try:
                seconds = self._rejection.admit(request, sequence.num_expected_rows)
            except OverloadedError as error:
                self._refused[number] = f"overloaded: {error}"
                return
            self._rejection.mark_queued(seconds)
        self._num_unfinished += 1
        self._engine.add(sequence, max_tokens if call.num_output is None else call.num_output)

    def _prompt(self, number: int, call: Call) -> tuple[int, ...]:
        """Returns tokens that are equal for equal runs and unique outside of runs."""
        if not self.scheduler.prefixes.is_on:
            prompt = self._prompts.get(call.num_prompt)
            if prompt is None:
                prompt = self._prompts[call.num_prompt] = (OTHER,) * call.num_prompt
            return prompt
        tokens: list[int] = []
        for key, length in call.runs:
            tokens += [2 * self._runs.setdefault(key, len(self._runs))] * length
        tokens += [2 * number + 1] * (call.num_prompt - len(tokens))
        return tuple(tokens[: call.num_prompt])

    # ---- results

    @property
    def num_preempted(self) -> int:
        """The number of requests that were preempted at least once."""
        return self._recorder.num_preempted

    def result(self, qps: float, seed: int) -> RunResult:
        recorder, delays = self._recorder, self._settings.delays
        records = []
        for number, (at_s, call) in enumerate(zip(self._arrivals_s, self._calls, strict=True)):
            record = Record(number, at_s, at_s, at_s, prompt_tokens=call.num_prompt)
            record.dispatched_s, record.group = at_s, call.group
            if number in self._refused:
                record.outcome, record.error = Outcome.FAILED, self._refused[number]
            else:
                recorder.fill(record, delays.output_s)
            records.append(record)
        return RunResult(
            qps,
            seed,
            "simulated",
            records,
            (0.0, max([record.finished_s for record in records], default=0.0)),
            steps=recorder.rows,
            samples=recorder.samples(),
            notes=self._notes(),
            gaps=recorder.gaps,
        )

    def _notes(self) -> list[str]:
        recorder, scheduler = self._recorder, self.scheduler
        notes = [
            f"simulated: {recorder.num_steps} steps in {self._engine.now_s:.1f} s of virtual time,"
            f" {scheduler.num_preemptions} preemptions,"
            f" {scheduler.num_priority_preemptions} of them for a higher priority"
        ]
        if len(recorder.rows) < recorder.num_steps:
            notes.append(f"every {recorder.stride}th of {recorder.num_steps} steps is kept")
        if not recorder.keeps_chunks:
            notes.append(
                "of each answer only the times of the first and last token are kept; times between"
                " tokens are a histogram with bins of 1 %"
            )
        return notes
