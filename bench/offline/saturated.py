"""Sends all requests at once to a started engine and traces its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from bench.load.client import run
from bench.load.client.record import Outcome, Record
from bench.load.client.targets import EngineTarget, OnChunk, TakeSteps
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.work import Schedule, Work
from serve import Engine, FinishReason
from serve.engine.step_trace import TracedStep
from serve.errors import GenerationError


class RecordingTarget(EngineTarget):
    """A target that keeps prompts and answers by the number of the request. The caller starts and
    stops the engine and traces its steps."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: the caller stops the engine."""

    async def send(self, prepared: Any, record: Record, on_chunk: OnChunk | None = None) -> None:
        work, params = prepared
        record.sent_s = time.perf_counter()
        if work.messages is not None:
            stream = self.engine.submit_chat(work.messages, params, client=work.client)
        else:
            prompt = work.token_ids or work.prompt or ""
            stream = self.engine.submit(prompt, params, client=work.client)
        tokens: list[int] = []
        async for delta in stream:
            if delta.token_ids:
                record.chunks_s.append(time.perf_counter())
                tokens += delta.token_ids
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise GenerationError(delta.error or "the request was aborted")
        prompt_ids = list((await stream.accepted()).prompt_token_ids)
        record.prompt_tokens, record.output_tokens = len(prompt_ids), len(tokens)
        self.prompts[record.index], self.tokens[record.index] = prompt_ids, tokens

    def trace_steps(self) -> TakeSteps:
        return lambda: ([], [])


@dataclass(frozen=True, slots=True)
class Saturated:
    """One run. seconds count from sending the requests to the end of the last one. prompts and
    tokens are the token ids of each request's prompt and answer."""

    seconds: float
    steps: list[TracedStep] = field(repr=False)
    prompts: list[list[int]] = field(repr=False)
    tokens: list[list[int]] = field(repr=False)
    num_preemptions: int

    @property
    def num_requests(self) -> int:
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tokens_per_request(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.num_requests

    @property
    def running_mean(self) -> float:
        """The mean number of running sequences over the time of the steps."""
        seconds = [step.ended_s - step.began_s for step in self.steps]
        pairs = zip(self.steps, seconds, strict=True)
        return sum(step.num_running * taken for step, taken in pairs) / sum(seconds)

    @property
    def running_most(self) -> int:
        return max(step.num_running for step in self.steps)


async def offer(target: RecordingTarget, schedule: Schedule, seed: int = 0) -> list[Record]:
    """Offers a schedule and returns the records. Raises GenerationError if a request fails, since
    the figures of the other requests would mislead."""
    records = (await run.offer(schedule, target, LoadOptions(seed=seed))).records
    failed = [record for record in records if record.outcome is not Outcome.OK]
    if failed:
        raise GenerationError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return records


async def saturate(target: RecordingTarget, works: Sequence[Work]) -> Saturated:
    """Offers all requests at once and traces the steps."""
    engine = target.engine
    trace, before = engine.trace_steps(), engine.stats().num_preemptions
    records = await offer(target, Schedule(math.inf, list(works), [0.0] * len(works)))
    return Saturated(
        max(r.finished_s for r in records) - min(r.sent_s for r in records),
        list(trace.steps),
        [target.prompts[number] for number in range(len(works))],
        [target.tokens[number] for number in range(len(works))],
        engine.stats().num_preemptions - before,
    )
