"""Formats in which quantized checkpoints are published, written from their descriptions.

A writer returns the tensors of one product and the numbers that they mean. It shares no code with
what reads them (quant/formats).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Json = dict[str, Any]
Tensors = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([E2M1, -E2M1])
_NF4 = """-1.0 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0.0
0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1.0"""
NF4 = torch.tensor([float(value) for value in _NF4.split()])
BNB_FP4 = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12
BNB_TABLES = {"nf4": NF4, "fp4": torch.cat([BNB_FP4, -BNB_FP4])}


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values[..., None] - table).abs().argmin(-1).to(torch.uint8)


def groups_of(weight: Tensor, size: int) -> Tensor:
    """[out, groups, size]"""
    return weight.float().reshape(len(weight), -1, size)


def low_first(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


# -- FP8


def to_e4m3(weight: Tensor) -> Tensor:
    return weight.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(scale: str, shape: tuple[int, ...] | None = None, *, per_tensor: bool = False) -> Quantize:
    """One scale per output, or per tensor."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        weight = weight.float()
        largest = weight.abs().amax() if per_tensor else weight.abs().amax(1, keepdim=True)
        scales = (largest / 448).bfloat16() if shape is None else largest / 448
        codes = to_e4m3(weight / scales.float())
        stored = scales if shape is None else scales.reshape(shape)
        tensors = {f"{name}.weight": codes, f"{name}.{scale}": stored}
        tensors[f"{name}.input_scale"] = torch.tensor(0.02)
        return tensors, codes.float() * scales.float()

    return quantize


def fp8_blocks(scale: str, rows: int, columns: int, kind: str = "f32", dims: int = 2) -> Quantize:
    """A scale per block, as fp32, or as powers of two in bytes or e8m0."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_out, num_in = weight.shape
        count = -(-num_out // rows), -(-num_in // columns)
        codes, plain = torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.float().clone()
        scales = torch.empty(count)
        for i in range(count[0]):
            for j in range(count[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale_of = plain[at].abs().max() / 448
                if kind != "f32":
                    scale_of = 2.0 ** scale_of.log2().ceil()
                codes[at] = to_e4m3(plain[at] / scale_of)
                plain[at], scales[i, j] = codes[at].float() * scale_of, scale_of
        stored = scales
        if kind != "f32":
            stored = (scales.log2() + 127).to(torch.uint8)
        if kind == "e8m0":
            stored = stored.view(torch.float8_e8m0fnu)
        if dims == 4:
            stored = stored[:, None, :, None]
        return {f"{name}.weight": codes, f"{name}.{scale}": stored}, plain

    return quantize


# -- FP4


def nvfp4(*, is_modelopt: bool = False) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = groups_of(weight, 16)
        factor = groups.abs().max() / (6 * 448)
        scales = to_e4m3(groups.abs().amax(2) / 6 / factor)
        steps = scales.float()[..., None] * factor
        codes = nearest(groups / torch.where(steps > 0, steps, 1.0), FP4)
        plain = (FP4[codes.long()] * steps).reshape(weight.shape)
        packed = low_first(codes.reshape(weight.shape))
        if is_modelopt:
            tensors = {f"{name}.weight": packed, f"{name}.weight_scale_2": factor}
            tensors[f"{name}.input_scale"] = torch.tensor(0.01)
        else:
            tensors = {f"{name}.weight_packed": packed}
            tensors[f"{name}.weight_global_scale"] = (1 / factor)[None]
            tensors[f"{name}.input_global_scale"] = torch.tensor([300.0])
        return tensors | {f"{name}.weight_scale": scales}, plain

    return quantize


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, bytes of scales and plain values."""
    groups = groups_of(weight, 32)
    exponents = groups.abs().amax(2).clamp(min=2.0**-40).log2().floor() - 2
    steps = 2.0 ** exponents[..., None]
    codes = nearest(groups / steps, FP4)
    plain = (FP4[codes.long()] * steps).reshape(weight.shape)
    return codes.reshape(weight.shape), (exponents + 127).to(torch.uint8), plain


def mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales, plain = mxfp4_codes(weight)
    return {f"{name}.weight_packed": low_first(codes), f"{name}.weight_scale": scales}, plain


def mxfp4_experts(name: str, weights: Tensor) -> tuple[Tensors, Tensor]:
    """Fused experts as gpt-oss has them, from weights: [experts, out, in]."""
    made = [mxfp4_codes(weight) for weight in weights]
    num_experts, num_out, num_in = weights.shape
    blocks = torch.stack([low_first(codes) for codes, _, _ in made])
    tensors = {
        f"{name}_blocks": blocks.reshape(num_experts, num_out, num_in // 32, 16),
        f"{name}_scales": torch.stack([scales for _, scales, _ in made]),
    }
    return tensors, torch.stack([plain for _, _, plain in made])


# -- integers of compressed-tensors


def pack_words(values: Tensor, bits: int) -> Tensor:
    """[n, m] of `bits` to [n, ceil(m * bits / 32)] int32, from the lowest bits on."""
    each = 32 // bits
    words = torch.zeros(values.shape[0], -(-values.shape[1] // each), dtype=torch.int64)
    for column in range(values.shape[1]):
        words[:, column // each] |= values[:, column].long() << bits * (column % each)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integers(
    weight: Tensor, bits: int, group_of: Tensor, *, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes and zero points from 0 on, scales, and plain values."""
    half, most = 2 ** (bits - 1), 2**bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        part = weight[:, group_of == group]
        if is_symmetric:
            scales.append((part.abs().amax(1) / (half - 0.5)).half())
            zeros.append(torch.full((len(weight),), half))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append(((high - low) / most).half())
            zeros.append((-low / scales[-1].float()).round().clamp(0, most).int())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).int()
    codes = (weight / scale[:, group_of].float()).round().int() + zero[:, group_of]
    codes = codes.clamp(0, most)
    return codes, zero, scale, (codes - zero[:, group_of]) * scale[:, group_of].float()


def pack_quantized(bits: int, group: int, *, sym: bool = True, order: bool = False) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        group_of = torch.arange(num_in) // (num_in if group == -1 else group)
        if order:
            # products of a layer that read the same rows have the same order
            group_of = group_of[torch.randperm(num_in, generator=torch.Generator().manual_seed(5))]
        codes, zeros, scales, plain = integers(weight, bits, group_of, is_symmetric=sym)
        tensors = {
            f"{name}.weight_packed": pack_words(codes, bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            tensors[f"{name}.weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
        if order:
            tensors[f"{name}.weight_g_idx"] = group_of.int()
        return tensors, plain

    return quantize


def int_quantized(group: int, *, sym: bool = True) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        group_of = torch.arange(num_in) // (num_in if group == -1 else group)
        codes, zeros, scales, plain = integers(weight, 8, group_of, is_symmetric=sym)
        tensors = {
            f"{name}.weight": (codes - 128).to(torch.int8),
            f"{name}.weight_scale": scales,
        }
        if not sym:
            tensors[f"{name}.weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, plain

    return quantize


def gptq8(group: int, *, sym: bool = True) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        group_of = torch.arange(num_in) // (num_in if group == -1 else group)
        codes, zeros, scales, plain = integers(weight, 8, group_of, is_symmetric=sym)
        stored = (zeros - 1) & 255  # AutoGPTQ stores them less one
        tensors = {
            f"{name}.qweight": pack_words(codes, 8).t().contiguous(),
            f"{name}.qzeros": pack_words(stored.t(), 8),
            f"{name}.scales": scales.t().contiguous(),
            f"{name}.g_idx": group_of.int(),
        }
        # the carry of a stored 255 goes into the next zero point, as in GPTQModel
        assert bool((zeros > 0).all())
        return {key: tensor.contiguous() for key, tensor in tensors.items()}, plain

    return quantize


# -- bitsandbytes


def bnb4(kind: str, block: int, *, is_nested: bool) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = weight.float().reshape(-1, block)
        absmax, table = blocks.abs().amax(1), BNB_TABLES[kind]
        state: Json = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        at = f"{name}.weight"
        tensors = {f"{at}.quant_map": table.clone(), f"{at}.absmax": absmax}
        if is_nested:
            values, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            parts = (absmax - offset).split(256)
            outer = torch.stack([part.abs().max() for part in parts])
            spread = outer.repeat_interleave(256)[: len(absmax)]
            codes = nearest((absmax - offset) / spread, values)
            absmax = values[codes.long()] * spread + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {f"{at}.absmax": codes, f"{at}.nested_absmax": outer}
            tensors[f"{at}.nested_quant_map"] = values
        codes = nearest(blocks / absmax[:, None], table)
        flat = codes.reshape(-1, 2)
        tensors[at] = ((flat[:, 0] << 4) | flat[:, 1])[:, None]
        tensors[f"{at}.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, (table[codes.long()] * absmax[:, None]).reshape(weight.shape)

    return quantize


def bnb8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.float().abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {f"{name}.weight": codes, f"{name}.SCB": largest}
    tensors[f"{name}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, codes.float() * largest[:, None] / 127


# -- HQQ


def hqq(bits: int, group: int) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, most = weight.float().reshape(-1, group), 2**bits - 1
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = ((high - low) / most).half()
        zero = (-low / scale.float()).half()
        codes = (rows / scale.float() + zero.float()).round().clamp(0, most).to(torch.uint8)
        packed = codes
        if bits == 4:
            half = len(codes) // 2
            packed = (codes[:half] << 4) | codes[half:]
        tensors = {
            f"{name}.W_q": packed,
            f"{name}.scale": scale,
            f"{name}.zero": zero,
            f"{name}.shape": torch.tensor(weight.shape),
            f"{name}.nbits": torch.tensor(bits, dtype=torch.int32),
            f"{name}.axis": torch.tensor(1, dtype=torch.int32),
            f"{name}.group_size": torch.tensor(group, dtype=torch.int32),
            f"{name}.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        }
        return tensors, ((codes - zero.float()) * scale.float()).reshape(weight.shape)

    return quantize
