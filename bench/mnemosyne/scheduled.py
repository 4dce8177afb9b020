"""A long prompt under the real scheduler at the depth of the grid (bench/simulate/stages.py)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from bench.load.client.record import RunResult
from bench.load.workload.work import Call
from bench.mnemosyne.paper import PRECISION, grid_cost
from bench.simulate.load import simulate
from bench.simulate.settings import SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig

STREAMS, STREAM_TOKENS = 8, 600
SHORTS, SHORT_TOKENS = 20, 500
_LONG_AT_S, _SHORTS_AT_S, _SHORTS_EVERY_S = 0.5, 1.0, 0.15
_PAGE_TOKENS = 256


class Beside(NamedTuple):
    """A long prompt beside decoding streams and short requests: seconds to its first token, to the
    short ones' at the latest, and between the tokens of the streams in 95 of 100 cases."""

    long_s: float
    short_s: float
    p95_s: float


def alone(model: str, spp: int, tokens: int, rows: int) -> float:
    """Returns the seconds to the first token of a prompt alone, in steps of up to `rows` rows."""
    result = _run(model, spp, [Call(tokens, 1, max_tokens=1)], [0.0], rows=rows)
    return result.records[0].chunks_s[0]


def beside_streams(model: str, spp: int, tokens: int, slo_s: float) -> Beside:
    """Runs a prompt beside STREAMS streams, with short requests that arrive while it is computed.
    Chunks are adapted to slo_s between tokens."""
    stream = Call(SHORT_TOKENS, STREAM_TOKENS, max_tokens=STREAM_TOKENS)
    short = Call(SHORT_TOKENS, 1, max_tokens=1)
    calls = [*[stream] * STREAMS, Call(tokens, 1, max_tokens=1), *[short] * SHORTS]
    arrivals = [0.0] * STREAMS + [_LONG_AT_S]
    arrivals += [_SHORTS_AT_S + _SHORTS_EVERY_S * number for number in range(SHORTS)]
    records = _run(model, spp, calls, arrivals, slo_s=slo_s).records
    ended_s = records[STREAMS].chunks_s[0]
    gaps = sorted(
        after - before
        for record in records[:STREAMS]
        for before, after in pairwise(record.chunks_s)
        if before > _LONG_AT_S and after < ended_s
    )
    shorts = [record.chunks_s[0] - record.sent_s for record in records[STREAMS + 1 :]]
    return Beside(ended_s - _LONG_AT_S, max(shorts), gaps[int(0.95 * len(gaps))])


def _run(
    model: str,
    spp: int,
    calls: list[Call],
    arrivals_s: list[float],
    *,
    rows: int = 4096,
    slo_s: float | None = None,
) -> RunResult:
    cost = grid_cost(model, spp)
    token_bytes = int(cost.shape.kv_token_bytes(PRECISION))
    page = _PAGE_TOKENS * token_bytes
    longest = max(call.num_prompt + (call.num_output or 0) for call in calls) + 1
    pages = sum(call.num_prompt + (call.num_output or 0) for call in calls) // _PAGE_TOKENS
    config = EngineConfig(
        max_model_len=longest,
        max_num_seqs=64,
        max_num_batched_tokens=rows,
        inter_token_slo_ms=None if slo_s is None else 1e3 * slo_s,
        inter_token_factor=math.inf if slo_s is None else 4.0,
        kv_cache_bytes=(pages + 2 * len(calls) + 2) * page,
        kv_page_bytes=page,
        prefix_cache=False,
        memory_policy="prompt_only",
    )
    settings = SimulationSettings(config, (LayerGroup(token_bytes),))
    return simulate(calls, arrivals_s, cost, settings)
