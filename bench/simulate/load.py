"""A load through a simulated engine: what is asked and when, in; a run's result, out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from bench.load.calls import Call
from bench.load.record import Outcome, Record, RunResult
from bench.simulate.cost import StepCost
from bench.simulate.engine import OTHER, SimulatedEngine, make_sequence
from bench.simulate.keep import MOST_CHUNKS, Keeper
from bench.simulate.settings import SimulationSettings
from serve.errors import OverloadedError
from serve.overload import EarlyRejection
from serve.request import Request, SamplingParams

_REPORT_STEPS = 4096  # from one word about the progress to the next


def simulate(
    calls: SequenceOf[Call],
    arrivals_s: SequenceOf[float],
    cost: StepCost,
    settings: SimulationSettings,
    *,
    qps: float | None = None,
    seed: int = 0,
    on_change: Callable[[int, int, float], None] | None = None,
) -> RunResult:
    """calls[i] comes arrivals_s[i] seconds after the start (ascending; at_s says nothing here);
    every request is run to its end (num_output None: to its max_tokens, or the context's). qps:
    what was asked for, if not what arrivals_s say. on_change(requests that came, that ended,
    simulated seconds), now and then. ConfigError: settings that do not work."""
    load = LoadSimulation(calls, arrivals_s, cost, settings)
    load.run(on_change)
    if qps is None:
        qps = len(calls) / arrivals_s[-1] if calls and arrivals_s[-1] > 0 else float("inf")
    return load.result(qps, seed)


class LoadSimulation:
    """One run, as serve/core.py does it: arrivals are messages between two steps."""

    def __init__(
        self,
        calls: SequenceOf[Call],
        arrivals_s: SequenceOf[float],
        cost: StepCost,
        settings: SimulationSettings,
    ) -> None:
        self._calls = calls
        self._arrivals_s = arrivals_s
        self._settings = settings
        self.scheduler = settings.make_scheduler(has_prefixes=any(call.runs for call in calls))
        scheduler = self.scheduler
        self._engine = SimulatedEngine(scheduler, cost)
        self._keeper = Keeper(
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
        self._keys: dict[int, int] = {}

    def run(self, on_change: Callable[[int, int, float], None] | None = None) -> None:
        engine, scheduler, keeper = self._engine, self.scheduler, self._keeper
        delays = self._settings.delays
        due = sorted(
            (at_s + delays.before(call.num_prompt), number)
            for number, (at_s, call) in enumerate(zip(self._arrivals_s, self._calls, strict=True))
        )
        place, count = 0, len(due)
        while True:
            while place < count and due[place][0] <= engine.now_s:
                self._take_in(due[place][1])
                place += 1
            if not scheduler.has_work():
                if place == count:
                    break
                engine.now_s = due[place][0]  # nothing to compute: the next message wakes it up
                continue
            finished = engine.step(keeper.watch)
            if finished is None:
                assert scheduler.running, "work, but nothing can be scheduled"
                continue
            for sequence in finished:
                keeper.ended(sequence, engine.now_s)
            self._num_unfinished -= len(finished)
            if on_change is not None and keeper.num_steps % _REPORT_STEPS == 0:
                on_change(place, scheduler.num_finished, engine.now_s)
        if on_change is not None:
            on_change(place, scheduler.num_finished, engine.now_s)

    # ---- requests

    def _take_in(self, number: int) -> None:
        """Checked as serve/intake.py and serve/admission.py do, and queued."""
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
            self._rejection.queued(seconds)
        self._num_unfinished += 1
        self._engine.add(sequence, max_tokens if call.num_output is None else call.num_output)

    def _prompt(self, number: int, call: Call) -> tuple[int, ...]:
        """Tokens that are equal where runs are, and new where there are none."""
        if not self.scheduler.prefixes.is_on:
            prompt = self._prompts.get(call.num_prompt)
            if prompt is None:
                prompt = self._prompts[call.num_prompt] = (OTHER,) * call.num_prompt
            return prompt
        tokens: list[int] = []
        for key, length in call.runs:
            tokens += [2 * self._keys.setdefault(key, len(self._keys))] * length
        tokens += [2 * number + 1] * (call.num_prompt - len(tokens))
        return tuple(tokens)

    # ---- what came of it

    def result(self, qps: float, seed: int) -> RunResult:
        keeper, delays = self._keeper, self._settings.delays
        records = []
        for number, (at_s, call) in enumerate(zip(self._arrivals_s, self._calls, strict=True)):
            record = Record(number, at_s, at_s, at_s, prompt_tokens=call.num_prompt)
            if number in self._refused:
                record.outcome, record.error = Outcome.FAILED, self._refused[number]
            else:
                keeper.fill(record, delays.output_s)
            records.append(record)
        return RunResult(
            qps,
            seed,
            "simulated",
            records,
            (0.0, max([record.finished_s for record in records], default=0.0)),
            steps=keeper.rows,
            samples=keeper.samples(),
            notes=self._notes(),
            gaps=keeper.gaps,
        )

    def _notes(self) -> list[str]:
        keeper, scheduler = self._keeper, self.scheduler
        notes = [
            f"simulated: {keeper.num_steps} steps in {self._engine.now_s:.1f} s of virtual time,"
            f" {scheduler.num_preemptions} preemptions"
            f" of which {scheduler.num_given_way} gave way to others"
        ]
        if len(keeper.rows) < keeper.num_steps:
            notes.append(f"of {keeper.num_steps} steps every {keeper.stride}th is kept")
        if not keeper.keeps_chunks:
            notes.append(
                "of each answer the first and the last token's time are kept; times between tokens"
                " are a histogram of 1 % steps"
            )
        return notes
