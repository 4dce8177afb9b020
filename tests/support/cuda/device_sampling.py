"""What the tests of device-side sampling share: steps of a sampler, and the definition of
sampling."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ops.cuda.device_sampler import DeviceSampler
from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from ops.triton_kernels.sampling import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# several chunks, several blocks of a chunk, and lists that overflow
SMALL = Config(chunk=256, block=128, capacity=200, warps=4, sample_warps=4)


def make_sampler(vocab_size, max_rows=16, num_slots=16, config=SMALL):
    return DeviceSampler(vocab_size, max_rows, num_slots, DEVICE, config)


def strided(rows):
    """Returns the same rows, apart from each other and unaligned."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 7), float("nan"), device=DEVICE)
    wide[:, 3 : 3 + rows.shape[1]] = rows
    return wide[:, 3 : 3 + rows.shape[1]]


def step(sampler, logits, rows):
    """Runs a step over a strided copy of logits. Returns (plan, tokens)."""
    plan = sampler.plan(rows)
    sampler.upload(plan)
    return plan, sampler.run(strided(logits), plan.kind).tolist()


def draw(logits, choices, length=4, config=SMALL):
    """Samples one token for each row; choices are DeviceSamplingInputs arguments as
    dictionaries."""
    rows = [
        Row(DeviceSamplingInputs(**choice), i, [0] * length) for i, choice in enumerate(choices)
    ]
    sampler = make_sampler(logits.shape[1], len(rows), len(rows), config)
    return step(sampler, logits, rows)[1]


class Expected(NamedTuple):
    """margin: distance to the nearest boundary of the decision, as a fraction of the kept mass."""

    token: int
    margin: float
    kept: set[int]


def expected_draw(row, u, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Cuts and inverts, by token id, one row that is sorted whole. row: [V] fp32."""
    scaled = row / torch.tensor(temperature, dtype=torch.float32)
    if min_p > 0:
        floor = np.float32(math.log(float(np.float32(min_p))))
        scaled = scaled.masked_fill(scaled < scaled.max() + torch.tensor(floor), float("-inf"))
    values, ids = torch.sort(scaled.double(), descending=True, stable=True)
    if 0 < top_k < len(row):
        values, ids = values[:top_k], ids[:top_k]
    mass = torch.exp(values - values[0])
    share = (mass.cumsum(0) - mass) / mass.sum()
    margin = 1.0
    if top_p < 1:
        margin = float((share[1:] - top_p).abs().min()) if len(share) > 1 else 1.0
        keep = share < top_p
        keep[0] = True
        mass, ids = mass[keep], ids[keep]
    ids, order = ids.sort()
    mass = mass[order]
    cumulative = mass.cumsum(0) / mass.sum()
    index = int(torch.searchsorted(cumulative, torch.tensor([u]).double(), right=True)[0])
    margin = min(margin, float((cumulative[mass > 0] - u).abs().min()))
    kept = set(ids[mass > 0].tolist())
    return Expected(int(ids[min(index, len(ids) - 1)]), margin, kept)


def make_rows(kind, num_rows, size):
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(num_rows, size, generator=generator)
    if kind == "peaked":
        return noise * 8
    if kind == "ties":
        return (noise * 2).round()
    if kind == "flat":
        return torch.zeros(num_rows, size)
    if kind == "holes":
        noise[:, 1::3] = float("-inf")
    return noise * 2
