"""Runs every kernel once on the device against a reference in fp64, to find what only a GPU shows.

An error is ||out - expected|| / ||expected||. The bounds allow for the rounding of int8, fp8 and
bf16 numbers; a wrong index is far outside them.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.attention import Heads, make_step
from bench.gpu.linear import Layer, fusion_of, make_rows
from bench.gpu.record import Figures, Record
from bench.gpu.rows import make_sampler
from bench.gpu.timing import device, relative_error
from ops import get_backend
from ops.backend import NF4_VALUES, Fusion, LinearOp

# Bounds of the error. Rows and weights are int8, or both e4m3; 4-bit weights are exact.
_BOUNDS = {"int8": 0.03, "fp8": 0.08, "int4": 0.03, "nf4": 0.03, "bf16": 0.02}


def check(out: Tensor, expected: Tensor, bound: float, **more: Any) -> Figures:
    error = relative_error(out, expected)
    assert error <= bound, f"error {error:.4g}, at most {bound} is right"
    return {"error": error, **more}


# ---- products


SMALL = (
    Layer("plain", 256, 160),
    Layer("norm", 320, 96, has_norm=True),
    Layer("gated", 256, 192, is_gated=True, has_norm=True),
    Layer("adds", 512, 128, adds=True),
)
LARGE = (
    Layer("up", 4096, 28672, is_gated=True, has_norm=True),
    Layer("down", 14336, 4096, adds=True),
    Layer("qkv", 4096, 6144, has_norm=True),
)


def linear(record: Record) -> None:
    """Checks int8 products, which are the engine's default."""
    _products(record, "int8", (1, 64, 1000), (1, 3, 17, 130))
    layer, count = (SMALL[3], 3) if record.is_dry else (LARGE[1], 300)
    record.run("int8: a row's bits do not depend on other rows", partial(_own_bits, layer, count))


def formats(record: Record) -> None:
    """Checks the products in the other formats."""
    for kind in _BOUNDS:
        if kind != "int8":
            _products(record, kind, (1, 64), (17, 130))


def _products(record: Record, kind: str, large: tuple[int, ...], small: tuple[int, ...]) -> None:
    """Checks the large and the small layers, each with its numbers of rows."""
    pairs = [*itertools.product(LARGE, large), *itertools.product(SMALL, small)]
    if record.is_dry:
        pairs = [(layer, 3) for layer in SMALL[2:]]
    for layer, count in pairs:
        record.run(f"{kind} {layer.name} M={count}", partial(_linear, kind, layer, count))


def _linear(kind: str, layer: Layer, count: int) -> Figures:
    op, weight, fusion = _make(kind, layer)
    x, residual = make_rows(kind, layer, count)
    expected = _expected(x, weight, fusion, residual)  # the residual may be overwritten
    return check(op(x, residual), expected, _BOUNDS[kind])


def _make(kind: str, layer: Layer) -> tuple[LinearOp, Tensor, Fusion]:
    """Returns an operator, the weights from which it was made, and its fusion."""
    backend = get_backend("cuda")
    fusion = fusion_of(layer, kind)
    weight = torch.randn(layer.num_rows, layer.num_in, device=device()) * layer.num_in**-0.5
    weight = weight.bfloat16()
    if kind == "bf16":
        return backend.pack_linear(weight, None, fusion), weight, fusion
    if kind == "int8":
        assert backend.quantized is not None
        return backend.quantized.int8([weight], None, fusion), weight, fusion
    from ops.cuda.linear import Fp8Linear, Int4Linear

    if kind == "fp8":
        return Fp8Linear([weight], None, fusion, device=device()), weight, fusion
    group = 64
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device=device())
    scales = torch.rand(layer.num_rows, layer.num_in // group, device=device()) * 0.02 + 0.001
    scales = scales.half().float()
    is_nf4 = kind == "nf4"
    values = torch.tensor(NF4_VALUES).double() if is_nf4 else torch.arange(-8.0, 8.0).double()
    exact = values.to(codes.device)[codes.long()]
    exact *= scales.double().repeat_interleave(group, 1)
    op = Int4Linear(codes, scales, None, None, fusion, group=group, table=kind, device=device())
    return op, exact, fusion


def _expected(x: Tensor, weight: Tensor, fusion: Fusion, residual: Tensor | None) -> Tensor:
    y = x.double()
    if fusion.norm is not None:
        inverse = (y.square().mean(1, keepdim=True) + fusion.norm.eps).rsqrt()
        y = y * inverse * fusion.norm.weight.double()
    y = y @ weight.double().t()
    if fusion.is_gated:
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def _own_bits(layer: Layer, count: int) -> Figures:
    """Checks that the first rows alone have the same results as among many rows."""
    op, _, _ = _make("int8", layer)
    x, residual = make_rows("int8", layer, count)

    def rows_of(some: int) -> Tensor:
        return op(x[:some].clone(), None if residual is None else residual[:some].clone())

    whole = rows_of(count)
    sizes = [size for size in (1, 2, 5, 16, 33, 64, 200) if size < count]
    differ = [size for size in sizes if not torch.equal(rows_of(size), whole[:size])]
    assert not differ, f"{differ} rows alone differ from the same rows among {count}"
    return {"sizes": len(sizes)}


# ---- attention


def attention(record: Record) -> None:
    shapes = {"gqa 4": Heads(8, 2, 64), "gqa 1, D 80": Heads(2, 2, 80), "gqa 7": Heads(14, 2, 64)}
    lengths = [1, 15, 40, 700]
    if record.is_dry:
        shapes, lengths = {"gqa 2": Heads(4, 2, 32)}, [1, 20]
    else:
        shapes["8B"] = Heads()
        lengths += [5000]
    for (name, heads), kind in itertools.product(shapes.items(), ("bf16", "int8")):
        for window in (None, 24) if not record.is_dry else (24,):
            about = f"{kind} {name}" + ("" if window is None else f" window {window}")
            decoding = [1] * len(lengths), lengths
            record.run(f"decode {about}", partial(_attend, heads, *decoding, kind, window))
            chunks = [7, 19] if record.is_dry else [7, 130, 300]
            prefixes = [0, 5, 200][: len(chunks)]
            kv_lens = [rows + prefix for rows, prefix in zip(chunks, prefixes, strict=True)]
            merged = decoding[0] + chunks, lengths + kv_lens
            record.run(f"merged {about}", partial(_attend, heads, *merged, kind, window))


def _attend(
    heads: Heads, num_rows: list[int], kv_lens: list[int], kind: str, window: int | None
) -> Figures:
    group = next(size for size in (64, 32, 16) if heads.dim % size == 0)
    step = make_step(heads, num_rows, kv_lens, kind, group=group, window=window)
    q, k, v = step.q, step.k, step.v
    out = step.attend[0]()
    expected = torch.empty_like(out, dtype=torch.float64)
    row = start = 0
    for rows, length in zip(num_rows, kv_lens, strict=True):
        keys, values = k[start : start + length], v[start : start + length]
        expected[row : row + rows] = _softmax_attention(q[row : row + rows], keys, values, window)
        row, start = row + rows, start + -(-length // 16) * 16
    return check(out, expected, 0.03 if kind == "int8" else 0.01)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Returns attention in fp64. q: [n, H, D], the last n of L positions; k, v: [L, Hk, D]."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    keys, values = (
        x.double().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v)
    )
    scale: float = dim**-0.5
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    position = torch.arange(length - rows, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


# ---- rows and sampling


def sampling(record: Record) -> None:
    shapes = [(2, 300)] if record.is_dry else [(3, 1000), (64, 128256)]
    for batch, vocab in shapes:
        for kind in ("greedy", "top-p 0.6", "top-k 5"):
            record.run(f"{kind} {batch} x {vocab}", partial(_sampled, kind, batch, vocab))
    for count, width in [(3, 96)] if record.is_dry else [(1, 96), (5, 4096), (700, 14336)]:
        record.run(f"norm {count} x {width}", partial(_norm_rows, count, width))
        record.run(f"codes {count} x {width}", partial(_codes, count, width))
        record.run(f"gated codes {count} x {width}", partial(_gated_codes, count, width))


def _sampled(kind: str, batch: int, vocab: int) -> Figures:
    """Checks that sampled tokens are allowed, and that a second call samples the same ones."""
    sampler, plan = make_sampler(kind, batch, vocab)
    logits = 2.5 * torch.randn(batch, vocab, device=device())
    tokens = sampler.run(logits.clone(), plan.kind).long().cpu()
    again = sampler.run(logits.clone(), plan.kind).long().cpu()
    assert torch.equal(tokens, again), "the same seeds gave other tokens"
    ordered, ids = logits.double().cpu().sort(dim=1, descending=True)
    rank = (ids == tokens[:, None]).int().argmax(1)
    if kind == "greedy":
        allowed = torch.ones(batch, dtype=torch.int64)
    elif kind.startswith("top-k"):
        allowed = torch.full((batch,), int(kind.split()[1]))
    else:
        before = ordered.softmax(1).cumsum(1) - ordered.softmax(1)
        allowed = (before < float(kind.split()[1]) + 1e-6).sum(1)
    assert bool((rank < allowed).all()), f"ranks {rank.tolist()[:9]}, below {allowed.tolist()[:9]}"
    return {"largest_rank": int(rank.max())}


def _norm_rows(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import norm_rows

    layer = Layer("", width, width, has_norm=True)
    x, norm = torch.randn(count, width, device=device()), fusion_of(layer).norm
    assert norm is not None
    eye = torch.eye(width, device=device())
    return check(norm_rows(x, norm), _expected(x, eye, Fusion(norm), None), 1e-5)


def _codes(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import quantize_rows

    layer = Layer("", width, width, has_norm=True)
    x, norm = torch.randn(count, width, device=device()), fusion_of(layer).norm
    found = quantize_rows(x, norm)
    expected = _expected(x, torch.eye(width, device=device()), Fusion(norm), None)
    return check(found.codes[:, :width] * found.scales[:, None], expected, 0.02)


def _gated_codes(count: int, width: int) -> Figures:
    from ops.triton_kernels.rows import quantize_rows

    x = torch.randn(count, 2 * width, device=device()).bfloat16()
    found = quantize_rows(x, None, "silu", is_gated=True)
    gate, up = x.double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    return check(found.codes[:, :width] * found.scales[:, None], expected, 0.03)
