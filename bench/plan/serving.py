"""Predicts latency and throughput of requests from the cost of a step.

All requests have the same length, and B of them are in flight. Each step has their B decode rows;
some steps also have prompt rows, as the scheduler merges them:

    chunk           prompt rows of a step: the fewest with which all prompts are computed in time,
                    or the most that keep the time between tokens. Of those that keep the time to
                    the first token, the chunk with more tokens a second is taken
    share           share of the steps that have prompt rows: B x prompt / (answer x chunk), at
                    most 0.9
    time per token  (1 - share) x step without prompt rows + share x step with prompt rows
    first token     half of the step in progress, the prompt's own steps, and the wait for earlier
                    prompts with Poisson arrivals (M/D/1): share / (2 - 2 share) x the prompt's time

Decode rows are costed in the middle of their answers, chunks in the middle of their prompts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any

from bench.plan.capacity import max_sequences
from bench.plan.cost import MachineCost, StepCost
from serve.scheduler.step_time import StepWork

GRANULARITY = 16
MAX_ROWS = {"cpu": 512, "gpu": 8192}  # most prompt rows of a step; more gain nothing
MAX_BATCH = 4096
MAX_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The tokens of a request's prompt and of its answer."""

    prompt: int
    output: int

    @property
    def context(self) -> int:
        """The longest context of a request."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in seconds: the mean time to the first token, and the longest between two tokens; inf
    sets no limit."""

    ttft_s: float = inf
    tpot_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Figures of a load that keeps `batch` requests in flight.

    chunk is the number of prompt rows of a step that has any. step_s is the mean time between two
    tokens of a sequence, longest_s the time of a step with prompt rows. binds names the resource
    on which the average step spends most time. limit names what prevents a larger batch: memory,
    tpot, ttft, prompts (computing them takes all steps) or batch (MAX_BATCH)."""

    batch: int
    chunk: int
    step_s: float
    longest_s: float
    ttft_s: float
    requests_per_s: float
    tokens_per_s: float
    binds: str
    limit: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decode_work(batch: int, context: int) -> StepWork:
    """Returns a decode step of `batch` sequences with `context` tokens each."""
    return StepWork(batch, batch * context, batch, samples=True)


def prefill_s(cost: StepCost, length: int, chunk: int) -> float:
    """Returns the seconds that a prompt takes alone, in steps of `chunk` rows."""
    total, done = 0.0, 0
    while done < length:
        rows = min(chunk, length - done)
        work = StepWork(samples=done + rows == length)
        work.add(rows, done)
        total += cost.seconds(work)
        done += rows
    return total


def serve(cost: MachineCost, load: Load, slo: Slo, batch: int) -> Serving | str:
    """Returns the figures, or the one of tpot, ttft and prompts that does not allow this batch."""
    decode = decode_work(batch, load.prompt + load.output // 2)
    most = _most_rows(cost, load, slo, decode)
    least = batch * load.prompt / (load.output * MAX_SHARE)
    least = GRANULARITY * ceil(least / GRANULARITY)
    if not most:
        return "tpot"
    if least > most:
        return "prompts"
    # fewer rows hide more arithmetic behind reading; more rows finish a prompt sooner
    tried = [_with_chunk(cost, load, decode, rows) for rows in (least, most)]
    kept = [serving for serving in tried if serving.ttft_s <= slo.ttft_s]
    return max(kept, key=lambda serving: serving.tokens_per_s) if kept else "ttft"


def _with_chunk(cost: MachineCost, load: Load, decode: StepWork, rows: int) -> Serving:
    batch = decode.num_decodes
    share = batch * load.prompt / (load.output * rows)
    mixed = _with_prompts(decode, rows, load)
    longest_s = cost.seconds(mixed)
    step_s = (1 - share) * cost.seconds(decode) + share * longest_s
    own_s = load.prompt / rows * longest_s
    spent = {
        name: (1 - share) * seconds + share * cost.resources(mixed)[name]
        for name, seconds in cost.resources(decode).items()
    }
    return Serving(
        batch=batch,
        chunk=rows,
        step_s=step_s,
        longest_s=longest_s,
        ttft_s=step_s / 2 + max(own_s, longest_s) + own_s * share / (2 - 2 * share),
        requests_per_s=batch / step_s / load.output,
        tokens_per_s=batch / step_s,
        binds=max(spent, key=spent.__getitem__),
    )


def _most_rows(cost: MachineCost, load: Load, slo: Slo, decode: StepWork) -> int:
    """Returns the most prompt rows, a multiple of GRANULARITY, with which a step keeps the SLO
    between tokens; 0 if none do."""
    fits = partial(_fits, cost, load, slo, decode)
    low, high = 0, MAX_ROWS[cost.machine.device.kind] // GRANULARITY + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRANULARITY) else (low, middle)
    return low * GRANULARITY


def _fits(cost: MachineCost, load: Load, slo: Slo, decode: StepWork, rows: int) -> bool:
    return cost.seconds(_with_prompts(decode, rows, load)) <= slo.tpot_s


def _with_prompts(decode: StepWork, rows: int, load: Load) -> StepWork:
    """Returns the decode step with `rows` prompt rows: whole prompts and the middle of another."""
    work = StepWork(decode.num_decodes, decode.num_context, decode.num_rows, samples=True)
    for _ in range(rows // load.prompt):
        work.add(load.prompt, 0)
    if rest := rows % load.prompt:
        work.add(rest, (load.prompt - rest) // 2)
    return work


def best(cost: MachineCost, load: Load, slo: Slo) -> Serving | str:
    """Returns the figures of the largest batch that memory and the SLO allow, which has the most
    tokens a second, or the name of the limit that does not allow even one sequence."""
    room = max_sequences(cost, load.context)
    if not room:
        return "memory"
    serving = serve(cost, load, slo, 1)
    if isinstance(serving, str):
        return serving
    limit = "memory" if room <= MAX_BATCH else "batch"
    low, high = 1, min(room, MAX_BATCH) + 1
    while high - low > 1:
        middle = (low + high) // 2
        tried = serve(cost, load, slo, middle)
        if isinstance(tried, str):
            high, limit = middle, tried
        else:
            low, serving = middle, tried
    return replace(serving, limit=limit)
