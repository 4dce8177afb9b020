"""Kernels that are bound by memory: rows between products, storing K/V, sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.attention import EIGHT_B, TINY, Heads
from bench.gpu.record import Figures, Record
from bench.gpu.timing import device, num_sets, time_works
from ops.backend import Norm


def run(record: Record) -> None:
    counts: tuple[int, ...] = (8192, 64, 1)
    batches: tuple[int, ...] = (64, 1)
    width, inner, vocab, heads = 4096, 14336, 128256, EIGHT_B
    if record.is_dry:
        counts, width, inner, vocab, heads, batches = (3,), 64, 128, 1000, TINY, (2,)
    for count in counts:
        record.run(f"norm + quantize {count} x {width}", partial(_norm_quantize, count, width))
        record.run(f"gate + quantize {count} x {inner}", partial(_gate_quantize, count, inner))
        record.run(f"norm {count} x {width}", partial(_norm, count, width))
        for kind in ("int8", "bf16"):
            name = f"rope + append {kind} {count}"
            record.run(name, partial(_append, heads, count, kind))
    for batch in batches:
        for kind in ("greedy", "top-p 0.9", "top-k 50", "temperature"):
            record.run(f"sampling {kind} {batch} x {vocab}", partial(sample, kind, batch, vocab))


def _norm_of(width: int) -> Norm:
    return Norm("rms", torch.rand(width, device=device()) + 0.5, None, 1e-5)


def _rows(count: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    size = count * width * dtype.itemsize
    return [torch.randn(count, width, device=device()).to(dtype) for _ in range(num_sets(2 * size))]


def _norm_quantize(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import quantize_rows

    rows, norm = _rows(count, width, torch.float32), _norm_of(width)
    timing = time_works([partial(quantize_rows, x, norm) for x in rows])
    return timing.figures(bytes=count * (5 * width + 4))


def _gate_quantize(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import quantize_rows

    rows = _rows(count, 2 * width, torch.bfloat16)
    timing = time_works([partial(quantize_rows, x, None, "silu", is_gated=True) for x in rows])
    return timing.figures(bytes=count * (5 * width + 4))


def _norm(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import norm_rows

    rows, norm = _rows(count, width, torch.float32), _norm_of(width)
    timing = time_works([partial(norm_rows, x, norm, torch.bfloat16) for x in rows])
    return timing.figures(bytes=6 * count * width)


def _append(heads: Heads, count: int, kind: str) -> Figures:
    """Times rotating k, and quantizing and writing k and v, which are read from the qkv rows."""
    from ops.cuda.attention import KVTiles, Rotation, layer_bytes
    from ops.triton_kernels.kv import append

    dtype, group = (torch.int8, min(64, heads.dim)) if kind == "int8" else (torch.bfloat16, None)
    size = layer_bytes(heads.kv, heads.dim, dtype, group)
    sets = num_sets(count * 4 * heads.kv * heads.dim)
    num_tiles = -(-count // 16)
    memory = torch.zeros(num_tiles * sets * size, dtype=torch.uint8, device=device())
    angles = torch.rand(count, heads.dim // 2, device=device())
    rotation = Rotation(angles.cos(), angles.sin())
    rows = torch.arange(count, device=device())
    works: list[Callable[[], object]] = []
    for number in range(sets):
        tiles = KVTiles(
            heads.query, heads.kv, heads.dim, 1.0, None, dtype, group,
            sets * size, number * size,
        )  # fmt: skip
        qkv = torch.randn(
            count, heads.query + 2 * heads.kv, heads.dim, device=device(), dtype=torch.bfloat16
        )
        k, v = qkv[:, heads.query : -heads.kv], qkv[:, -heads.kv :]
        works.append(partial(append, tiles, memory.data_ptr(), k, v, rows, rotation))
    moved = count * (size // 16 + 4 * heads.kv * heads.dim + 4 * heads.dim)
    return time_works(works).figures(bytes=moved)


def make_sampler(kind: str, batch: int, vocab: int) -> tuple[Any, Any]:
    """Returns a DeviceSampler that has uploaded a step's plan, and the plan."""
    from ops.cuda.device_sampler import DeviceSampler
    from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row

    options: dict[str, Any] = {"temperature": float(kind != "greedy")}  # 1 keeps the logits
    if kind.startswith("top-p"):
        options["top_p"] = float(kind.split()[1])
    if kind.startswith("top-k"):
        options["top_k"] = int(kind.split()[1])
    sampler = DeviceSampler(vocab, batch, batch, device())
    rows = [Row(DeviceSamplingInputs(seed=7 + i, **options), i, [1, 2, 3]) for i in range(batch)]
    plan = sampler.plan(rows)
    sampler.upload(plan)
    return sampler, plan


def sample(kind: str, batch: int, vocab: int) -> Figures:
    """Times sampling. bytes: those of all logits, read once."""
    sampler, plan = make_sampler(kind, batch, vocab)
    # The logits differ as much as a model's. If they were closer, the kernel could skip none.
    logits = [
        2.5 * torch.randn(batch, vocab, device=device()) for _ in range(num_sets(4 * batch * vocab))
    ]
    timing = time_works([partial(sampler.run, each, plan.kind) for each in logits])
    return timing.figures(bytes=4 * batch * vocab)
