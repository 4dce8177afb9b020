"""What a step's cost means for those who are served: time between tokens, to the first one, rates.

Requests have prompts and answers of one length. B of them are in flight; each step has their B
rows, and some steps a chunk of a prompt besides, as our scheduler merges them:

    chunk           the most rows with which a step with all B still keeps the time between tokens
    share           of the steps that have a chunk: B x prompt / (answer x chunk), at most 0.9
    time per token  (1 - share) x step without + share x step with a chunk, on average
    first token     steps with chunks for the whole prompt, and what comes before: with Poisson
                    arrivals and one prompt after the other (M/D/1) share / (2 - 2 share) as long

Steps are counted with contexts in the middle of their answer (decode) or of their prompt (chunks).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any

from bench.plan.capacity import max_sequences
from bench.plan.cost import MachineCost, StepCost
from serve.step_time import StepWork

GRANULARITY = 16
CHUNK = {"cpu": 256, "gpu": 2048}  # the engine's rows of a step
MAX_BATCH = 4096
MAX_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int

    @property
    def context(self) -> int:
        """When it is longest."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Seconds: to the first token on average, between two tokens at most. inf: any."""

    ttft_s: float = inf
    tpot_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """So many in flight, all the time. step_s: between two tokens of one of them, on average;
    longest_s: with a chunk. binds: what the average step mostly waits for. limit: what keeps a
    larger batch away: memory, tpot, ttft or prompts (their computing takes all steps)."""

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
    """A step of sequences of which all have so many tokens before this one."""
    return StepWork(batch, batch * context, batch, samples=True)


def prefill_s(cost: StepCost, length: int, chunk: int) -> float:
    """A prompt alone, in steps of so many rows."""
    total, done = 0.0, 0
    while done < length:
        rows = min(chunk, length - done)
        work = StepWork(samples=done + rows == length)
        work.add(rows, done)
        total += cost.seconds(work)
        done += rows
    return total


def serve(cost: MachineCost, load: Load, slo: Slo, batch: int) -> Serving | str:
    """Figures, or which of tpot, ttft and prompts does not allow so many."""
    context = load.prompt + load.output // 2
    decode = decode_work(batch, context)
    chunk = _chunk(cost, load, slo, decode)
    if not chunk:
        return "tpot"
    share = batch * load.prompt / (load.output * chunk)
    if share > MAX_SHARE:
        return "prompts"
    mixed = _with_chunk(decode, chunk, load)
    longest_s = cost.seconds(mixed)
    step_s = (1 - share) * cost.seconds(decode) + share * longest_s
    alone_s = load.prompt / chunk * longest_s if chunk < load.prompt else longest_s
    ttft_s = alone_s * (1 + share / (2 - 2 * share))
    if ttft_s > slo.ttft_s:
        return "ttft"
    spent = {
        name: (1 - share) * seconds + share * cost.resources(mixed)[name]
        for name, seconds in cost.resources(decode).items()
    }
    rate = batch / step_s
    return Serving(
        batch=batch,
        chunk=chunk,
        step_s=step_s,
        longest_s=longest_s,
        ttft_s=ttft_s,
        requests_per_s=rate / load.output,
        tokens_per_s=rate,
        binds=max(spent, key=spent.__getitem__),
    )


def _chunk(cost: MachineCost, load: Load, slo: Slo, decode: StepWork) -> int:
    """Rows of the prompt in a step; 0 if there is no time for any."""
    most = min(load.prompt, CHUNK[cost.machine.device.kind])
    fits = partial(_fits, cost, load, slo, decode)
    if fits(most):
        return most
    low, high = 0, -(-most // GRANULARITY)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRANULARITY) else (low, middle)
    return low * GRANULARITY


def _fits(cost: MachineCost, load: Load, slo: Slo, decode: StepWork, rows: int) -> bool:
    return cost.seconds(_with_chunk(decode, rows, load)) <= slo.tpot_s


def _with_chunk(decode: StepWork, rows: int, load: Load) -> StepWork:
    work = StepWork(decode.num_decodes, decode.num_context, decode.num_rows, samples=True)
    work.add(rows, (load.prompt - rows) // 2)
    return work


def best(cost: MachineCost, load: Load, slo: Slo) -> Serving | str:
    """The largest batch that memory and the SLO allow: it gives the most tokens a second.
    The name of a limit if not even one sequence is served."""
    room = min(MAX_BATCH, max_sequences(cost, load.context))
    if not room:
        return "memory"
    found = serve(cost, load, slo, 1)
    if isinstance(found, str):
        return found
    low, high, limit = 1, room + 1, "memory"
    while high - low > 1:
        middle = (low + high) // 2
        tried = serve(cost, load, slo, middle)
        if isinstance(tried, str):
            high, limit = middle, tried
        else:
            low, found = middle, tried
    return replace(found, limit=limit)
