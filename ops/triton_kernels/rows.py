"""Rows between two products: norm, activation, gate and quantization, one program a row.

Memory is the bound of all kernels here: a row is read once into registers (rows that do not fit are
read again from the L2 cache), and 1 to 4 bytes per value are written. The arithmetic of a value,
about 20 instructions, overlaps with these transfers.

The statistics of a row are integer sums (squares in fixed point, of values scaled by a power of
two) and a maximum. So no result depends on the order of addition, the number of threads or the
kernel that computes it. This needs enable_fp_fusion=False.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.backend import Norm

ACTIVATIONS = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
    "relu2": 5,
    "swiglu_oai": 6,  # only with gates
}
NORMS = {"rms": 1, "layer": 2}
# Rows up to this length are held in registers.
MAX_BLOCK = 8192
# Adding 1.5 * 2^23 rounds a small number, half to even, into the low bits.
ROUNDER = tl.constexpr(12582912.0)
# Rows whose largest magnitude is below it count as zeros: 127 divided by it must be finite.
SMALLEST = tl.constexpr(1e-30)
_FIXED = tl.constexpr(float(2**40))
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Applies an activation to x: fp32. KIND: a value of ACTIVATIONS."""
    if KIND == 1:
        x = x / (1.0 + tl.exp(tl.minimum(-x, 88.0)))
    elif KIND == 2:
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == 3:
        # 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2u))
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(tl.minimum(-u, 88.0)))
    elif KIND == 4:
        x = tl.where(x < 0.0, 0.0, x)
    elif KIND == 5:
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    elif KIND == 6:
        x = tl.where(x > 7.0, 7.0, x)
        x = x / (1.0 + tl.exp(tl.minimum(-1.702 * x, 88.0)))
    return x


@triton.jit
def gate_factor(up, KIND: tl.constexpr):
    """Returns what multiplies the activated gates."""
    if KIND == 6:
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return up


@triton.jit
def magnitude(x):
    """Returns |x| as an integer of the same order, with infinity and NaN above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_unit(top):
    """Returns powers of two (f, 1 / f) with top * f in [1, 4), or below 1 for a tiny magnitude."""
    exponent = tl.minimum(tl.maximum(top >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return down, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def fixed(x):
    """Returns x: fp32 in (-16, 16) as fixed-point int64; 2^17 of them can be added."""
    return (x * _FIXED).to(tl.int64)


@triton.jit
def mean_of(total, n):
    """Returns the mean in fp32 for total, a sum of fixed() values."""
    return total.to(tl.float32) * (1.0 / _FIXED) / n


@triton.jit
def code_step(top, LIMIT: tl.constexpr):
    """Returns (codes per unit, scale of a code) for top, the magnitude of a row's largest value.

    LIMIT: the largest code, 127 or 448. A row with an infinity or a NaN gets codes of 0 and
    a scale of NaN.
    """
    largest = top.to(tl.float32, bitcast=True)
    is_usual = (largest >= SMALLEST) & (top < _INFINITE)
    step = tl.where(is_usual, LIMIT / tl.where(is_usual, largest, 1.0), 0.0)
    scale = tl.where(is_usual, largest / LIMIT, 0.0)
    return step, tl.where(top < _INFINITE, scale, float("nan"))


@triton.jit
def to_codes(x, step, FP8: tl.constexpr):
    """Returns x * step as int8, half to even, or as e4m3; 0 if step is 0."""
    scaled = tl.where(step == 0.0, 0.0, x) * step
    if FP8:
        # Rounding here to 3 mantissa bits, or to 2^-9, makes the cast exact on every device.
        bits = scaled.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        tiny = (scaled + 24576.0) - 24576.0
        is_tiny = tl.abs(scaled) < 0.015625
        codes = tl.where(is_tiny, tiny, bits.to(tl.float32, bitcast=True)).to(tl.float8e4nv)
    else:
        codes = (scaled + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def _values(at, cols, n, ACT: tl.constexpr, GATED: tl.constexpr):
    """Loads the input of the norm in fp32, with zeros beyond the row."""
    mask = cols < n
    x = activate(tl.load(at + cols, mask=mask, other=0.0).to(tl.float32), ACT)
    if GATED:
        x *= gate_factor(tl.load(at + n + cols, mask=mask, other=0.0).to(tl.float32), ACT)
    return x


@triton.jit
def _weighted(
    x, mean, weight_at, bias_at, inverse, cols, n, NORM: tl.constexpr, BIAS: tl.constexpr
):
    """Returns the normalized row; for rms without the factor `inverse`, which scales whole rows."""
    if NORM != 0:
        weight = tl.load(weight_at + cols, mask=cols < n, other=0.0).to(tl.float32)
        if NORM == 2:
            x = (x - mean) * inverse
        x *= weight
        if BIAS:
            x += tl.load(bias_at + cols, mask=cols < n, other=0.0).to(tl.float32)
    return x


@triton.jit
def _squares(x, mean, unit, is_usual, cols, n):
    centred = tl.where((cols < n) & is_usual, (x - mean) * unit, 0.0)
    return tl.sum(fixed(centred * centred), 0)


@triton.jit
def make_row(
    row, x_at, weight_at, bias_at, out_at, scales_at,
    x_stride, x_inner_stride, inner, out_stride, n, n_padded, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    QUANTIZE: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes act, gate and norm of a row; stores codes and a scale, or values in out's type.

    x: [rows / inner, inner, n]. n_padded - n codes of 0 follow a row. ONE_BLOCK: n_padded <= BLOCK.
    """
    x_at += row // inner * x_stride + row % inner * x_inner_stride
    out_at += row * out_stride
    lanes = tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), tl.float32)
    if ONE_BLOCK:
        x = _values(x_at, lanes, n, ACT, GATED)
    mean = 0.0
    inverse = 1.0
    if NORM != 0:
        top = tl.max(magnitude(x), 0)
        if not ONE_BLOCK:
            for start in range(0, n, BLOCK):
                x = _values(x_at, start + lanes, n, ACT, GATED)
                top = tl.maximum(top, tl.max(magnitude(x), 0))
        is_usual = top < _INFINITE
        down, up = to_unit(top)
        if NORM == 2:
            total = tl.sum(fixed(tl.where(is_usual, x * down, 0.0)), 0)
            if not ONE_BLOCK:
                total = tl.zeros_like(total)
                for start in range(0, n, BLOCK):
                    x = _values(x_at, start + lanes, n, ACT, GATED)
                    total += tl.sum(fixed(tl.where(is_usual, x * down, 0.0)), 0)
            mean = mean_of(total, n) * up
        if ONE_BLOCK:
            total = _squares(x, mean, down, is_usual, lanes, n)
        else:
            total = tl.zeros((), tl.int64)
            for start in range(0, n, BLOCK):
                x = _values(x_at, start + lanes, n, ACT, GATED)
                total += _squares(x, mean, down, is_usual, start + lanes, n)
        inverse = 1.0 / tl.sqrt(mean_of(total, n) * up * up + eps)
        inverse = tl.where(is_usual, inverse, float("nan"))
    after = inverse if NORM == 1 else 1.0
    if QUANTIZE:
        if ONE_BLOCK:
            x = _weighted(x, mean, weight_at, bias_at, inverse, lanes, n, NORM, BIAS)
            top = tl.max(tl.where(lanes < n, magnitude(x), 0), 0)
        else:
            top = tl.zeros((), tl.int32)
            for start in range(0, n, BLOCK):
                cols = start + lanes
                x = _values(x_at, cols, n, ACT, GATED)
                x = _weighted(x, mean, weight_at, bias_at, inverse, cols, n, NORM, BIAS)
                top = tl.maximum(top, tl.max(tl.where(cols < n, magnitude(x), 0), 0))
        FP8: tl.constexpr = out_at.dtype.element_ty == tl.float8e4nv
        step, scale = code_step(top, 448.0 if FP8 else 127.0)
        tl.store(scales_at + row, scale * after)
        for start in range(0, n_padded, BLOCK):
            cols = start + lanes
            if not ONE_BLOCK:
                x = _values(x_at, cols, n, ACT, GATED)
                x = _weighted(x, mean, weight_at, bias_at, inverse, cols, n, NORM, BIAS)
            codes = to_codes(tl.where(cols < n, x, 0.0), step, FP8)
            tl.store(out_at + cols, codes, mask=cols < n_padded)
    else:
        for start in range(0, n, BLOCK):
            cols = start + lanes
            if not ONE_BLOCK:
                x = _values(x_at, cols, n, ACT, GATED)
            y = _weighted(x, mean, weight_at, bias_at, inverse, cols, n, NORM, BIAS) * after
            tl.store(out_at + cols, y.to(out_at.dtype.element_ty), mask=cols < n)


@triton.jit
def rows_kernel(
    x_at, weight_at, bias_at, out_at, scales_at,
    x_stride, x_inner_stride, inner, out_stride, n, n_padded, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    QUANTIZE: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes make_row for every row, one program each."""
    make_row(
        tl.program_id(0).to(tl.int64), x_at, weight_at, bias_at, out_at, scales_at,
        x_stride, x_inner_stride, inner, out_stride, n, n_padded, eps,
        NORM, BIAS, ACT, GATED, QUANTIZE, ONE_BLOCK, BLOCK,
    )  # fmt: skip


class Quantized(NamedTuple):
    """Quantized rows. codes: [T, N] int8 or e4m3, N zero-padded to a multiple of 16; scales: [T]
    fp32."""

    codes: Tensor
    scales: Tensor


def norm_rows(x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor:
    """Normalizes x: [..., N] fp32 or bf16, with up to two strided leading dimensions, to dtype."""
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    return _launch(x, out, None, norm, None, False)


def activation_rows(x: Tensor, kind: str) -> Tensor:
    """Applies an activation to x: [T, F]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, out, None, None, kind, False)


def gated_rows(gate_up: Tensor, kind: str) -> Tensor:
    """Returns act(gate) * up: [T, F] for gate_up: [T, 2F], gates first."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return _launch(gate_up, out, None, None, kind, True)


def quantize_rows(
    x: Tensor,
    norm: Norm | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    multiple: int = 16,
    dtype: torch.dtype = torch.int8,
) -> Quantized:
    """Quantizes x: [T, N] fp32 or bf16 (gated: [T, 2N]) with a scale per row, max |x| / 127.

    For float8_e4m3fn the scale is max |x| / 448. Codes are zero-padded to a multiple of `multiple`.
    """
    rows, width = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    codes = torch.empty(rows, -(-width // multiple) * multiple, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _launch(x, codes, scales, norm, activation, is_gated)
    return Quantized(codes, scales)


def _launch(
    x: Tensor,
    out: Tensor,
    scales: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    is_gated: bool,
) -> Tensor:
    """Writes out, and scales if out holds codes. Returns out."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    if x.dim() == 1:
        x = x[None]
    width = x.shape[-1] // (2 if is_gated else 1)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if not rows:
        return out
    inner = x.shape[1] if x.dim() == 3 else 1
    padded = out.shape[-1]
    block = min(MAX_BLOCK, triton.next_power_of_2(padded))
    rows_kernel[(rows,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        out,
        scales,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        inner,
        padded,
        width,
        padded,
        0.0 if norm is None else norm.eps,
        NORM=0 if norm is None else NORMS[norm.kind],
        BIAS=norm is not None and norm.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        QUANTIZE=scales is not None,
        ONE_BLOCK=padded <= block,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        enable_fp_fusion=False,
    )
    return out
