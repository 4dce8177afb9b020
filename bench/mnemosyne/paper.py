"""The setup of the Mnemosyne paper (arXiv 2409.17264), its inputs, and the one fitted constant.

Inputs are published: up to 16 DGX-H100 servers with tensor parallelism of 8, NVLink within a server
and 50 GB/s a GPU between servers, bf16, CUDA graphs (so no overhead a layer), 50 to 60 % of the
arithmetic in prompts (figure 20) and up to 92 % of the bandwidth in decode (figure 21). The kernels
get the middle of the first and all of the second. What a layer pays for K/V on other holders is not
published; EXCHANGE_S is fitted to the three figures of decode with such holders (figure 17).
"""

from __future__ import annotations

import collections.abc as abc
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from bench.plan.efficiency import Efficiency
from bench.plan.grid import EXCHANGE_S, Grid, GridCost, decode_work
from bench.plan.hardware import Device, load_devices
from bench.plan.pipeline import estimated_prefill_s, fixed_chunks
from bench.plan.shapes import Precision, Shape, load_shape

MILLION = 1_000_000
DEVICE = "h100-sxm"
SMALL, LARGE = "llama-3.1-8b", "llama-3.1-70b"  # Llama 3 has the same dimensions
PRECISION = Precision("bfloat16", "bfloat16")
PRODUCTS, READS = 0.55, 0.92
EFFICIENCY = Efficiency(
    weights=READS,
    kv=READS,
    products=((1, PRODUCTS),),
    decode=PRODUCTS,
    prefill=PRODUCTS,
    rows=READS,
    memory=0.9,
    is_measured=False,
)
SERVER = 8
_STEPS = 60


def grid_cost(
    model: str,
    spp: int = 1,
    kvp: int = 1,
    *,
    segment_tokens: float = inf,
    exchange_s: float | None = None,
) -> GridCost:
    """Returns the cost on servers with tp 8; exchange_s None takes the fitted constant."""
    return GridCost(
        _shape(model),
        PRECISION,
        _device(),
        Grid(SERVER, spp, kvp),
        EFFICIENCY,
        segment_tokens=segment_tokens,
        exchange_s=EXCHANGE_S if exchange_s is None else exchange_s,
    )


def decode_s(
    model: str, context: int, spp: int, kvp: int, exchange_s: float | None = None
) -> float:
    """Returns the seconds between tokens of one sequence that kvp holders share evenly."""
    cost = grid_cost(model, spp, kvp, segment_tokens=context / kvp, exchange_s=exchange_s)
    return cost.pass_seconds(decode_work(context))


class Figure17(NamedTuple):
    """Decode of 10 M tokens: the share of time that a second holder saves, the speedup of four, and
    tokens per second with two."""

    saved: float
    speedup: float
    tokens_per_s: float


PUBLISHED = Figure17(0.40, 2.5, 30.0)


def figure_17(exchange_s: float | None = None, fixed_s: float = 0.0) -> Figure17:
    """Returns the figures with a time of every exchange, and a fixed time of every step."""
    one, two, four = (
        fixed_s + decode_s(SMALL, 10 * MILLION, 4, kvp, exchange_s) for kvp in (1, 2, 4)
    )
    return Figure17(1 - two / one, one / four, 1 / two)


def error_of(found: Figure17) -> float:
    """Returns the sum of squared relative errors; that of the saved share is of what is left."""
    pairs = (
        (1 - found.saved, 1 - PUBLISHED.saved),
        (found.speedup, PUBLISHED.speedup),
        (found.tokens_per_s, PUBLISHED.tokens_per_s),
    )
    return sum([(one / other - 1) ** 2 for one, other in pairs])


def fit_exchange_s() -> float:
    """Returns the seconds of an exchange in a layer with which error_of is least."""
    return _least(lambda seconds: error_of(figure_17(seconds)), 1e-3)


def fit_fixed_s() -> float:
    """Returns the fixed seconds of a step with which error_of is least, without exchanges."""
    return _least(lambda seconds: error_of(figure_17(0.0, seconds)), 50e-3)


def chunk_ratio(fixed_s: float = 0.0) -> float:
    """Returns how much longer 1 M tokens take on one server in chunks of 32 than of 4,096, with a
    fixed time of every step."""
    few, many = ((_one_server_s(rows), ceil(MILLION / rows)) for rows in (4096, 32))
    return (many[0] + fixed_s * many[1]) / (few[0] + fixed_s * few[1])


@cache
def _one_server_s(rows: int) -> float:
    return estimated_prefill_s(grid_cost(SMALL), MILLION, fixed_chunks(rows))


@cache
def _shape(model: str) -> Shape:
    return load_shape(model)


@cache
def _device() -> Device:
    return load_devices()[DEVICE]


def _least(error: abc.Callable[[float], float], high: float) -> float:
    """Returns where a function with one minimum is least between 0 and high."""
    low = 0.0
    for _ in range(_STEPS):
        third = (high - low) / 3
        if error(low + third) < error(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
