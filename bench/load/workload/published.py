"""Requests with the lengths of published traces, without the traces' files.

The quantiles of Azure-Conv, Azure-Code (Azure Public Dataset, LLM inference trace 2023, CC-BY) and
Kimi-Conv (Mooncake's conversation trace, FAST'25) are known: they were computed from the public
files, and the means are those of Lamina's table. Only the means of Kimi-TA (Mooncake's tool and
agent trace) are known (Lamina; Mooncake says 8,596 for the prompts, not 8,560), so it is taken as
log-normal with sigma 1. Kimi-Conv reuses 37 % of its prompt tokens by its hash ids (the paper's
table says 40 %), Kimi-TA 59 % (the paper's table).

The following is assumed, not measured. 24 clients have a Zipf-like activity, and 40 % of the
variance of length (as a normal score) lies between the clients, as the answers of one application
resemble each other. Two of three clients leave max_tokens unset; the others send the round figure
(256, 1024, 4096 ...) above the 95th percentile of their answers, so that some answers are cut. The
reuse of Kimi-TA is spread over the requests as in Kimi-Conv, but more requests have it.

Every sample has exactly the distribution, whatever its size and seed, because ranks replace
random draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from bench.load.workload.work import Call, Run

NUM_CLIENTS = 24
BETWEEN_CLIENTS = 0.4
ROUND_FIGURES = (64, 256, 1024, 4096, 16384)
BLOCK = 512  # tokens of a hash id in Mooncake's traces
PERCENTS = (
    *(0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90),
    *(93, 95, 97, 98, 99, 99.5, 99.9, 100),
)


@dataclass(frozen=True, slots=True)
class Marginal:
    """A distribution of lengths: its mean, and the logarithms of its quantiles at shares (0 to 1),
    between which they are interpolated linearly."""

    mean: float
    shares: tuple[float, ...]
    logs: tuple[float, ...]

    @classmethod
    def measured(cls, mean: float, values: Sequence[float]) -> Marginal:
        """Returns the distribution with these quantiles at PERCENTS."""
        logs = tuple(math.log(value) for value in values)
        return cls(mean, tuple(percent / 100 for percent in PERCENTS), logs)

    @classmethod
    def lognormal(cls, mean: float, median: float) -> Marginal:
        sigma = math.sqrt(2 * math.log(mean / median))
        scores = [i / 20 for i in range(-100, 101)]
        normal = NormalDist()
        logs = tuple(math.log(median) + sigma * score for score in scores)
        return cls(mean, tuple(normal.cdf(score) for score in scores), logs)

    @property
    def median(self) -> float:
        return math.exp(float(np.interp(0.5, self.shares, self.logs)))

    def lengths(self, scores: np.ndarray) -> np.ndarray:
        """Returns [N] whole numbers with this distribution, ranked as the scores [N] are. The upper
        half is scaled slightly, so that the sample has the mean."""
        count = len(scores)
        ranks = np.empty(count)
        ranks[np.argsort(scores, kind="stable")] = np.arange(count) + 0.5
        values = np.exp(np.interp(ranks / count, self.shares, self.logs))
        upper = values > self.median
        below = float(values[~upper].sum())
        if upper.any():
            values[upper] *= (self.mean * count - below) / float(values[upper].sum())
        return np.maximum(1, np.rint(values)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How prompts repeat earlier prompts. All prompts begin with the same first block.

    sharing is the share of requests whose prompt continues an earlier one. parts are quantiles, at
    even shares from 0 to 1, of the repeated part of a prompt. ages are the median and sigma of the
    log-normal number of requests since the earlier prompt."""

    sharing: float
    parts: tuple[float, ...]
    ages: tuple[float, float] = (420.0, 0.95)


@dataclass(frozen=True, slots=True)
class Published:
    """A trace. correlation is that between the normal scores of prompt and answer of a client."""

    prompt: Marginal
    output: Marginal
    num_requests: int
    correlation: float = 0.0
    reuse: Reuse | None = None


# Quantiles of the requests' shared parts in Mooncake's conversation trace, weighted by blocks.
KIMI_PARTS = (0.03, 0.23, 0.47, 0.68, 0.86, 0.92, 0.94, 0.96, 0.98, 0.99, 1.0)

AZURE_CONV = Published(
    Marginal.measured(
        1154.7,
        (
            *(2, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130),
            *(1189, 1315, 1876, 2734, 4076, 4083, 4090, 4098, 4142, 4831, 6179, 14050),
        ),
    ),
    Marginal.measured(
        211.1,
        (
            *(7, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400),
            *(411, 424, 433, 451, 509, 540, 601, 643, 954, 1000),
        ),
    ),
    num_requests=19_366,
    correlation=0.12,
)
AZURE_CODE = Published(
    Marginal.measured(
        2047.8,
        (
            *(3, 17, 35, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164),
            *(2433, 2744, 3192, 3920, 5188, 6194, 7303, 7435, 7436, 7436, 7436, 7437, 7437),
        ),
    ),
    Marginal.measured(
        27.9,
        (
            *(6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 72, 90),
            *(128, 171, 251, 359, 825, 1899),
        ),
    ),
    num_requests=8_819,
)
KIMI_CONV = Published(
    Marginal.measured(
        12035.1,
        (
            *(891, 894, 896, 901, 964, 1261, 1662, 2306, 3263, 4251, 4993, 5870, 6909, 8187, 9570),
            *(11238, 13196, 15367, 17869, 21464, 27367, 32399, 39550, 52215, 66449, 85400),
            *(100810, 121301, 126195),
        ),
    ),
    Marginal.measured(
        342.6,
        (
            *(1, 3, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472),
            *(504, 543, 597, 648, 698, 800, 892, 1119, 1568, 2000, 2000),
        ),
    ),
    num_requests=12_031,
    correlation=0.12,
    reuse=Reuse(0.48, KIMI_PARTS),
)
KIMI_TA = Published(
    Marginal.lognormal(8560.0, 8560.0 / math.exp(0.5)),
    Marginal.lognormal(182.1, 182.1 / math.exp(0.5)),
    num_requests=23_608,
    reuse=Reuse(0.80, KIMI_PARTS),
)
PUBLISHED = {
    "azure-conv": AZURE_CONV,
    "azure-code": AZURE_CODE,
    "kimi-conv": KIMI_CONV,
    "kimi-ta": KIMI_TA,
}


def published_calls(trace: Published, count: int, seed: int) -> list[Call]:
    """Returns count calls of the trace, in the order of arrival."""
    rng = np.random.default_rng(list(f"lengths-{seed}".encode()))
    activity = np.array([1 / (1 + i) for i in range(NUM_CLIENTS)])
    activity /= activity.sum()
    clients = rng.choice(NUM_CLIENTS, count, p=activity)
    between, within = math.sqrt(BETWEEN_CLIENTS), math.sqrt(1 - BETWEEN_CLIENTS)
    of_client, other_of_client = rng.standard_normal((2, NUM_CLIENTS))
    of_client -= activity @ of_client
    product = activity @ (of_client * other_of_client) / (activity @ of_client**2)
    other_of_client -= product * of_client  # so few clients would be correlated by chance
    own, other = rng.standard_normal((2, count))
    other = trace.correlation * own + math.sqrt(1 - trace.correlation**2) * other
    prompts = trace.prompt.lengths(between * of_client[clients] + within * own)
    outputs = trace.output.lengths(between * other_of_client[clients] + within * other)
    calls = with_max_tokens(clients.tolist(), prompts.tolist(), outputs.tolist())
    return calls if trace.reuse is None else _with_runs(calls, trace.reuse, seed)


def with_max_tokens(
    clients: Sequence[int], prompts: Sequence[int], outputs: Sequence[int]
) -> list[Call]:
    """Returns calls in which every third client sends a max_tokens, which is a round figure."""
    by_client = np.asarray(clients)
    all_outputs = np.asarray(outputs)
    figures: dict[int, int | None] = {}
    for client in set(clients):
        own = np.sort(all_outputs[by_client == client])
        longest = int(own[int(0.95 * (len(own) - 1))])
        figure = min((n for n in ROUND_FIGURES if n > longest), default=None)
        figures[client] = figure if client % 3 == 2 else None
    names = {client: f"client-{client}" for client in figures}
    return [
        Call(prompt, output, figures[client], client=names[client])
        for client, prompt, output in zip(clients, prompts, outputs, strict=True)
    ]


def _with_runs(calls: list[Call], reuse: Reuse, seed: int) -> list[Call]:
    """Gives the prompts runs of whole blocks, some of which are those of an earlier request."""
    rng = random.Random(f"reuse-{seed}")
    shares = np.linspace(0, 1, len(reuse.parts)).tolist()
    blocks: list[tuple[Run, ...]] = []
    fresh = 1
    with_runs = []
    for number, call in enumerate(calls):
        total = call.num_prompt // BLOCK
        shared: tuple[Run, ...] = ((0, BLOCK),) if total else ()
        if rng.random() < reuse.sharing:
            num_shared = round(float(np.interp(rng.random(), shares, reuse.parts)) * total)
            age = round(rng.lognormvariate(math.log(reuse.ages[0]), reuse.ages[1]))
            end = number - age % max(1, number)
            earlier = _longest(blocks[max(0, end - 200) : end], num_shared)
            shared = earlier[: max(1, num_shared)] if total and earlier else shared
        own = range(fresh, fresh + total - len(shared))
        fresh = own.stop
        blocks.append((*shared, *((key, BLOCK) for key in own)))
        with_runs.append(replace(call, runs=blocks[-1]))
    return with_runs


def _longest(blocks: list[tuple[Run, ...]], count: int) -> tuple[Run, ...]:
    """Returns the last item with as many runs as wanted, else one with the most runs."""
    best: tuple[Run, ...] = ()
    for runs in reversed(blocks):
        if len(runs) >= count:
            return runs
        best = max(best, runs, key=len)
    return best
