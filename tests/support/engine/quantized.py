"""Quantized checkpoints of a tiny Llama, written nibble by nibble, and the numbers they mean.

Shares no code with what reads them (quant/formats).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.published_formats import EXACT, ROUNDED

Json = dict[str, Any]
Tensors = dict[str, Tensor]
LAYERS = [
    f"model.layers.{i}.{part}"
    for i in range(2)
    for part in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]
W8A8: Json = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
                "actorder": None,
                "group_size": None,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
                "actorder": None,
            },
        }
    },
}
GPTQ: Json = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}
AWQ: Json = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}


class Codes(NamedTuple):
    """4-bit codes [out, in], scales and zero points [out, groups], and the group of each input."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def plain(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return (self.codes - zeros).float() * scales.float()


def to_codes(weight: Tensor, group: int, order: Tensor | None = None, sym: bool = False) -> Codes:
    """Rounds a weight per group. order: the inputs, those of the first group first; by default
    as they are."""
    num_in = weight.shape[1]
    size = num_in if group == -1 else group
    group_of = torch.empty(num_in, dtype=torch.long)
    group_of[torch.arange(num_in) if order is None else order] = torch.arange(num_in) // size
    scales, zeros = [], []
    for g in range(num_in // size):
        part = weight[:, group_of == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            scale = (part.abs().amax(1) / 7.5).half()
            zeros.append(torch.full_like(scale, 8).int())
        else:
            scale = ((high - low) / 15).half()
            zeros.append((-low / scale.float()).round().int().clamp(1, 15))
        scales.append(scale)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    steps = (weight / scale[:, group_of].float()).round().int() + zero[:, group_of]
    return Codes(steps.clamp(0, 15), scale, zero, group_of)


def words(values: Tensor, positions: list[int]) -> Tensor:
    """Packs [n, m] of 4 bits into [n, m / 8] int32; value positions[i] of eight goes to bits
    4i..4i+3."""
    out = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for column in range(out.shape[1]):
        for i, place in enumerate(positions):
            out[:, column] |= (values[:, 8 * column + place].long() & 15) << (4 * i)
    return torch.where(out >= 2**31, out - 2**32, out).int()


IN_ORDER, INTERLEAVED = [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7]


def gptq_tensors(name: str, c: Codes, offset: int = 1) -> Tensors:
    return {
        f"{name}.qweight": words(c.codes, IN_ORDER).t().contiguous(),
        f"{name}.qzeros": words((c.zeros - offset).t(), IN_ORDER),
        f"{name}.scales": c.scales.t().contiguous(),
        f"{name}.g_idx": c.group_of.int(),
    }


def awq_tensors(name: str, c: Codes) -> Tensors:
    return {
        f"{name}.qweight": words(c.codes.t(), INTERLEAVED),
        f"{name}.qzeros": words(c.zeros.t(), INTERLEAVED),
        f"{name}.scales": c.scales.t().contiguous(),
    }


def int8_tensors(
    name: str, weight: Tensor, shape: tuple[int, ...] = (-1, 1)
) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    tensors = {f"{name}.weight": values, f"{name}.weight_scale": scales.reshape(shape)}
    return tensors, values.float() * scales.float()


Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def four_bits(config: Json, *, has_order: bool = False) -> Quantize:
    """Returns a writer of a layer's tensors in the format of a GPTQ or AWQ config, and their
    plain values."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        order = None
        if has_order:  # the same for all products of a layer that read the same rows
            seed = int(name.split(".")[2]) * 10 + ("o_proj" in name) + 2 * ("down" in name)
            generator = torch.Generator().manual_seed(seed + (3 if "mlp" in name else 0))
            order = torch.randperm(weight.shape[1], generator=generator)
        codes = to_codes(weight, config["group_size"], order, config.get("sym", False))
        if config["quant_method"] == "awq":
            return awq_tensors(name, codes), codes.plain()
        offset = 0 if config["checkpoint_format"] == "gptq_v2" else 1
        return gptq_tensors(name, codes, offset), codes.plain()

    return quantize


CASES: dict[str, tuple[Json, Quantize]] = {
    "w8a8": (W8A8, int8_tensors),
    "w8a8-flat": (W8A8, lambda n, w: int8_tensors(n, w, (-1,))),
    "gptq": (GPTQ, four_bits(GPTQ)),
    "gptq-asym": (GPTQ | {"sym": False}, four_bits(GPTQ | {"sym": False})),
    "gptq-v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        four_bits(GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}),
    ),
    "gptq-channel": (GPTQ | {"group_size": -1}, four_bits(GPTQ | {"group_size": -1})),
    "gptq-order": (GPTQ | {"desc_act": True}, four_bits(GPTQ, has_order=True)),
    "awq": (AWQ, four_bits(AWQ)),
    "awq-channel": (AWQ | {"group_size": -1}, four_bits(AWQ | {"group_size": -1})),
    "awq-own-keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        four_bits(AWQ),
    ),
    **EXACT,
}
"""Formats whose numbers stay as they are."""

ALL_CASES = CASES | ROUNDED


def write(
    path: Path, config: Json, quantize: Quantize, *, variant: str = "base", head: bool = False
) -> tuple[Path, Path]:
    """Returns (the quantized checkpoint, a plain one with the same numbers)."""
    source = checkpoint("llama", variant)
    packed, plain = path / "packed", path / "plain"
    for target in (packed, plain):
        shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    wide = dict(tensors)
    for name in LAYERS + (["lm_head"] if head else []):
        made, meant = quantize(name, tensors[f"{name}.weight"])
        del tensors[f"{name}.weight"]
        tensors |= made
        wide[f"{name}.weight"] = meant
    save_file({k: t.contiguous() for k, t in tensors.items()}, packed / "model.safetensors")
    save_file(wide, plain / "model.safetensors")
    edit_json(packed / "config.json", lambda c: c.update(quantization_config=config))
    return packed, plain
