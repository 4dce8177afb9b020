"""The cases of `serve bench ops` for linear layers: int8, bf16 and fp32, 4-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ops import Fusion, LinearOp, Norm
from ops.backend import TABLE_VALUES
from ops.cpu.native_plain_linear import PlainLinear
from ops.cpu.native_quantized_linear import Int4Linear, Int8Linear, SuperblockLinear
from ops.superblocks import SUPERBLOCK, SUPERBLOCK_KINDS, Superblocks

LINEAR_SHAPE = (2048, 8192)
# The table of values of each kind of 4-bit weights.
INT4_TABLES = {
    **dict.fromkeys(("int4", "zeros", "minimums"), "int4"),
    **{table: table for table in TABLE_VALUES},
}
# The kind and the group of each case: bench.kernels.int4 has all groups.
INT4_CASES = {
    "int4": ("int4", 64),
    "int4 zeros": ("zeros", 64),
    "int4 minimums": ("minimums", 32),
    "nf4": ("nf4", 64),
    "mxfp4": ("fp4", 32),
}
FAR = 400 << 20  # bytes of operands that no cache holds
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls, and as many calls of the same functions without rows, whose time is subtracted."""

    run: Run
    idle: Run | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape. work: the bytes or operations that it must move or do.

    ceiling: read, i8, bf16, f32, or moved, which is what `beside` does with the same bytes. target:
    the share of the ceiling that the kernel has to reach, 0 where there is none. peer: what a user
    would call otherwise; its work is peer_work. rows: all that the calls compute, where the time of
    a row is asked for.
    """

    name: str
    shape: str
    ceiling: str
    work: float
    target: float
    timed: Timed
    beside: Timed | None = None
    peer: Run | None = None
    peer_work: float = 0.0
    rows: int = 0


def linear_cases(quick: bool) -> Iterator[Case]:
    """Yields products with weights in no cache. The bytes of the weights bind them up to M=8, the
    multiply-adds from 16 on."""
    num_in, num_out = LINEAR_SHAPE
    copies = 2 if quick else FAR // (num_in * num_out)
    layers = [Int8Linear(torch.randn(num_out, num_in), None) for _ in range(copies)]
    targets = {1: 0.88, 4: 0.88, 8: 0.85, 16: 0.65, 32: 0.75, 64: 0.8, 512: 0.9}
    for rows in [1, 16] if quick else list(targets):
        x = torch.randn(rows, num_in)
        is_read = rows <= 8
        yield Case(
            "int8 linear",
            f"M={rows} K={num_in} N={num_out}",
            "read" if is_read else "i8",
            num_in * num_out * copies * (1 if is_read else 2 * rows),
            targets[rows],
            Timed(partial(_apply_all, layers, x)),
        )


def gated_cases(quick: bool) -> Iterator[Case]:
    """Yields an MLP's first layer with RMSNorm, gate and up in one product, and SiLU."""
    num_in, num_out = LINEAR_SHAPE
    size = 2 * num_in * num_out
    copies = 2 if quick else FAR // size
    fusion = Fusion(Norm("rms", torch.ones(num_in), None, 1e-5), "silu", True)
    layers = [Int8Linear(torch.randn(2 * num_out, num_in), None, fusion) for _ in range(copies)]
    targets = {1: 0.85, 8: 0.8, 32: 0.7, 512: 0.8}
    for rows in [1] if quick else list(targets):
        x = torch.randn(rows, num_in)
        is_read = rows <= 8
        yield Case(
            "int8 gated linear",
            f"M={rows} K={num_in} N=2x{num_out}",
            "read" if is_read else "i8",
            size * copies * (1 if is_read else 2 * rows),
            targets[rows],
            Timed(partial(_apply_all, layers, x)),
        )


def _apply_all(layers: Sequence[LinearOp | Callable[[Tensor], Tensor]], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def plain_cases(quick: bool) -> Iterator[Case]:
    """Yields bf16 and fp32 products, with oneDNN as peer. fp32 multiplies at half the rate
    of bf16 at most."""
    num_in, num_out = LINEAR_SHAPE
    shares = {1: 0.88, 8: 0.88, 16: 0.6, 32: 0.75, 64: 0.8, 512: 0.85}
    for dtype, name, targets in [
        (torch.bfloat16, "bf16", shares),
        (torch.float32, "fp32", {1: 0.88, 64: 0.4}),
    ]:
        copies = 2 if quick else FAR // (num_in * num_out * dtype.itemsize)
        weights = [torch.randn(num_out, num_in).to(dtype) for _ in range(copies)]
        layers = [PlainLinear(weight, None) for weight in weights]
        peers = [_onednn(weight) for weight in weights]
        del weights
        for rows in [1] if quick else list(targets):
            x = torch.randn(rows, num_in).to(dtype)
            is_read = rows <= 8
            size = num_in * num_out * copies
            work = size * dtype.itemsize if is_read else 2.0 * rows * size
            yield Case(
                f"{name} linear",
                f"M={rows} K={num_in} N={num_out}",
                "read" if is_read else "bf16",
                work,
                targets[rows],
                Timed(partial(_apply_all, layers, x)),
                peer=partial(_apply_all, peers, x),
                peer_work=work,
            )


def _onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns torch's packed product, which is an internal operator."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, None, "none", [], "")


def random_int4(
    kind: str, group: int, size_bytes: int, shape: tuple[int, int] = LINEAR_SHAPE
) -> list[Int4Linear]:
    """Packs random codes, scales and offsets as often as fill size_bytes, but twice at least.

    kind: one of INT4_TABLES. group: inputs that share a scale. shape: inputs, outputs.
    """
    num_in, num_out = shape
    shape = (num_out, num_in // group)
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    scales = torch.rand(shape) + 0.1
    if kind == "fp4":  # as those of MXFP4
        scales = 2.0 ** torch.randint(-3, 1, shape)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if kind == "zeros" else None
    minimums = scales * torch.rand(shape) * 16 if kind == "minimums" else None
    pack = partial(Int4Linear, codes, scales, zeros, None, group=group, minimums=minimums)
    layers = [pack(table=INT4_TABLES[kind])]
    while len(layers) < max(2, size_bytes // layers[0].size_bytes):
        layers.append(pack(table=INT4_TABLES[kind]))
    return layers


def random_superblocks(
    kind: str, size_bytes: int, shape: tuple[int, int] = LINEAR_SHAPE
) -> list[SuperblockLinear]:
    """Packs random weights as often as fill size_bytes, but twice at least.

    kind: of SUPERBLOCK_KINDS. shape: inputs, outputs.
    """
    (num_in, num_out), layout = shape, SUPERBLOCK_KINDS[kind]
    halves, groups = (num_out, num_in // SUPERBLOCK), (num_out, num_in // layout.group)
    lifts = torch.randint(0, 64, groups, dtype=torch.uint8) if layout.has_minimums else None
    weight = Superblocks(
        kind,
        torch.randint(0, 1 << layout.bits, (num_out, num_in), dtype=torch.uint8),
        torch.rand(halves).half(),
        torch.randint(0, 64, groups, dtype=torch.int8),
        torch.rand(halves).half() if layout.has_minimums else None,
        lifts,
    )
    layers = [SuperblockLinear(weight, None)]
    while len(layers) < max(2, size_bytes // layers[0].size_bytes):
        layers.append(SuperblockLinear(weight, None))
    return layers


def int4_cases(quick: bool) -> Iterator[Case]:
    """Yields 4-bit products. Their bytes bind them at few rows, the multiply-adds from 16 on."""
    num_in, num_out = LINEAR_SHAPE
    for name, (kind, group) in INT4_CASES.items():
        ops = random_int4(kind, group, 0 if quick else FAR)
        size_bytes = sum(op.size_bytes for op in ops)
        for rows in (1, 16) if quick else (1, 4, 8, 16, 64, 512):
            x = torch.randn(rows, num_in)
            is_read = rows <= 8
            yield Case(
                f"{name} linear",
                f"M={rows} K={num_in} N={num_out}",
                "read" if is_read else "i8",
                size_bytes if is_read else 2.0 * rows * num_in * num_out * len(ops),
                0.8 if is_read else 0.6,
                Timed(partial(_apply_all, ops, x)),
            )
