"""Runs all variants one after the other, in rounds, on the same requests.

The order of the variants rotates by one per round. Prefixes are not cached, so a round profits from
earlier ones only by what the length predictor has learned. A saturated run gets all requests at
once. A run at a rate gets Poisson arrivals, the same for all variants, at a lower rate than "ours"
can serve.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.ablation.parts import with_scripted_ends
from bench.ablation.variants import OURS, Variant
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.work import Schedule, Work
from bench.offline.saturated import RecordingTarget, Saturated, offer, saturate
from serve import Engine
from serve.engine.loader import load_engine

RATE_SHARE = 0.85  # share of the rate that "ours" reaches when saturated
_WARM_UP = 16  # number of requests before a run
_RATE_ROUNDS = 2  # follow the saturated rounds, so that compared runs are close in time
_SHORT_SHARE = 0.25  # share of max_num_seqs average requests that short memory holds
_SHORT_CONTEXTS = 2.2  # contexts it holds at least: a sequence with K/V twice as large must fit


@dataclass(slots=True)
class Round:
    """One turn of a variant. ttft_s (from the time at which a request was due) and tpot_s have an
    entry for each request at the rate; they are empty in rounds without a rate."""

    saturated: Saturated
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """The runs to make. settings are those of every engine. With has_rate, latency at a rate is
    measured too. The run chooses qps, and kv_cache_bytes of variants with short memory, if they are
    None. With keeps_engines all engines stay loaded, else each is loaded for its turn. ends are the
    lengths of answers by prompt (with_scripted_ends); if there are none, the model ends them."""

    model: str | None
    works: list[Work]
    settings: dict[str, Any]
    rounds: int
    max_num_seqs: int
    has_rate: bool = True
    keeps_engines: bool = True
    ends: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    qps: float | None = None
    kv_cache_bytes: int | None = None

    @property
    def num_turns(self) -> int:
        """The number of runs of each variant."""
        rate_rounds = min(_RATE_ROUNDS, self.rounds) if self.has_rate else 0
        return self.rounds + rate_rounds + self.keeps_engines


@dataclass(frozen=True, slots=True)
class AblationResult:
    """The rounds by variant, and the rate and memory that were chosen for them."""

    rounds: dict[str, list[Round]]
    qps: float
    short_bytes: int
    kv_bytes_per_token: int
    tokens_per_request: float


async def measure(
    plan: AblationPlan, variants: Sequence[Variant], advance: Callable[[str], None]
) -> AblationResult:
    """Runs the plan. The first of the variants must be "ours". advance(name) is called before each
    turn of a variant."""
    rounds: dict[str, list[Round]] = {variant.name: [] for variant in variants}
    async with AsyncExitStack() as stack:
        advance(OURS)
        async with _open_target(plan, variants[0], 0) as ours:
            first = await saturate(ours, plan.works)
            stats = ours.engine.stats()
            qps = plan.qps or RATE_SHARE * first.requests_per_s
            short_bytes = plan.kv_cache_bytes or _short_bytes(plan, ours.engine, first)
        targets: dict[str, RecordingTarget] = {}
        for variant in variants if plan.keeps_engines else ():
            advance(variant.name)
            kept = await stack.enter_async_context(_open_target(plan, variant, short_bytes))
            targets[variant.name] = kept
        for number in range(plan.rounds):
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                advance(variant.name)
                async with _at_turn(plan, variant, short_bytes, targets) as target:
                    rounds[variant.name].append(Round(await saturate(target, plan.works)))
        for number in range(min(_RATE_ROUNDS, plan.rounds) if plan.has_rate else 0):
            for variant in variants:
                advance(variant.name)
                if variant.has_rate:
                    async with _at_turn(plan, variant, short_bytes, targets) as target:
                        rated = rounds[variant.name][number]
                        await _at_rate(target, plan.works, qps, number, rated)
    return AblationResult(
        rounds, qps, short_bytes, stats.kv_bytes_per_token, first.tokens_per_request
    )


@asynccontextmanager
async def _at_turn(
    plan: AblationPlan, variant: Variant, short_bytes: int, kept: dict[str, RecordingTarget]
) -> AsyncIterator[RecordingTarget]:
    if variant.name in kept:
        yield kept[variant.name]
        return
    async with _open_target(plan, variant, short_bytes) as target:
        yield target


@asynccontextmanager
async def _open_target(
    plan: AblationPlan, variant: Variant, short_bytes: int
) -> AsyncIterator[RecordingTarget]:
    settings: dict[str, Any] = {"prefix_cache": False, "speculation": "off", "seed": 0}
    settings["max_num_seqs"] = plan.max_num_seqs
    settings |= plan.settings | variant.settings
    if variant.is_short:
        settings["kv_cache_bytes"] = short_bytes
    parts = with_scripted_ends(variant.parts, plan.ends) if plan.ends else variant.parts
    load = partial(load_engine, parts=parts)
    async with Engine(plan.model, load=load, **settings) as engine:
        target = RecordingTarget(engine)
        await saturate(target, plan.works[: _WARM_UP if plan.keeps_engines else 2])
        yield target


def _short_bytes(plan: AblationPlan, engine: Engine, first: Saturated) -> int:
    average = _SHORT_SHARE * plan.max_num_seqs * first.tokens_per_request
    tokens = max(average, _SHORT_CONTEXTS * engine.max_model_len)
    return math.ceil(tokens * engine.stats().kv_bytes_per_token)


async def _at_rate(
    target: RecordingTarget, works: list[Work], qps: float, seed: int, round_: Round
) -> None:
    arrivals_s = arrival_times("poisson", qps, len(works), seed)
    for record in await offer(target, Schedule(qps, works, arrivals_s), seed):
        first_s, last_s = record.chunks_s[0], record.chunks_s[-1]
        round_.ttft_s.append(first_s - record.scheduled_s)
        if record.output_tokens and record.output_tokens > 1:
            round_.tpot_s.append((last_s - first_s) / (record.output_tokens - 1))
