"""bitsandbytes: NF4 and FP4 in blocks of the flat weight, and LLM.int8.

    4 bits  weight uint8 [out x in / 2, 1], the higher bits first; weight.absmax, the scale of each
            block, fp32, or uint8 indexes into weight.nested_quant_map, times weight.nested_absmax
            of 256 blocks, plus an offset; weight.quant_map, the table of 16 values;
            weight.quant_state.bitsandbytes__nf4 (or fp4), bytes of JSON
    int8    weight int8 [out, in], SCB fp32 [out], 127 times the scale

The 4-bit tables are those of the kernels but for rounding: NF4 in 127ths, and FP4's smallest value,
1/192 of a block's largest, as zero. `plain` has the exact values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_quantized_linear import NATIVE
from ops.linear import HEADROOM, split_scales
from quant.formats.base import (
    CheckpointFormat,
    Config,
    Fetch,
    TensorRule,
    checked_scales,
    expect,
    joined,
    several,
    wrong,
)
from quant.formats.weights import Weight8, byte_nibbles, joined_8, kernel_group
from quant.int4 import Int4Weight

METHOD = "bitsandbytes"
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE = 4096  # bytes of JSON


class Table(NamedTuple):
    """A table of 16 values. kernel: the kernels' nearest; codes: its code of each value; factor:
    a value over the kernel's."""

    values: tuple[float, ...]
    kernel: str
    codes: tuple[int, ...]
    factor: float
    loss: str


NF4 = Table(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "nf4",
    tuple(range(16)),
    1.0,
    "NF4 values become multiples of 1/127, which changes weights by about 0.6 % (root mean square, "
    "of normal weights)",
)
# Twelfths: the eight positive values, then the same with a sign.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = Table(
    tuple(sign * value / 12 for sign in (1, -1) for value in _FP4),
    "fp4",
    tuple(sign + code for sign in (0, 8) for code in (0, 0, 6, 7, 4, 5, 2, 3)),
    1 / 6,
    "FP4's smallest value becomes zero, which changes weights by about 0.6 % (root mean square, of "
    "normal weights)",
)
TABLES = {"nf4": NF4, "fp4": FP4}


@dataclass(frozen=True, slots=True)
class TableWeight:
    """Codes of a table times scales. codes: [out, in]; scales: [out, groups] fp32."""

    codes: Tensor
    scales: Tensor
    group: int
    table: Table
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.codes.shape
        return num_out, num_in

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        table = self.table
        codes, scales, channels = self.codes, self.scales, None
        if table.kernel == "fp4":
            codes = _mapped(codes, torch.tensor(table.codes, dtype=torch.uint8))
            # that table takes no scales of more than 11 bits
            halves, channels = split_scales(scales, HEADROOM)
            scales = halves.float()
        factor = torch.full((len(codes),), table.factor * self.factor)
        channels = factor if channels is None else channels * factor
        weight = Int4Weight(codes, scales, None, self.group, table.kernel, channel_scales=channels)
        return weight.linear(bias, fusion, linears)

    def plain(self) -> Tensor:
        out = torch.tensor(self.table.values)[self.codes.int()]
        for group, scales in enumerate(self.scales.unbind(1)):
            out[:, group * self.group : (group + 1) * self.group] *= scales[:, None]
        return out.mul_(self.factor)

    def scaled(self, factor: float) -> TableWeight:
        return replace(self, factor=self.factor * factor)

    def rows(self, order: Tensor) -> TableWeight:
        return replace(self, codes=self.codes[order], scales=self.scales[order])


def _mapped(codes: Tensor, table: Tensor) -> Tensor:
    """Returns the table's value of each code, in pieces, since indexes take four bytes each."""
    out = torch.empty_like(codes)
    for start in range(0, len(codes), 64):
        rows = slice(start, start + 64)
        out[rows] = table[codes[rows].int()]
    return out


@dataclass(frozen=True, slots=True)
class FourBits:
    """4-bit weights. kind: a key of TABLES."""

    kind: str
    is_nested: bool
    markers: tuple[str, ...] = ("weight.absmax",)
    ignored: tuple[str, ...] = ()
    bits: int = 4

    @property
    def loss(self) -> str | None:
        return TABLES[self.kind].loss

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        size = num_in * num_out
        counts = tuple((size // block,) for block in BLOCKS if num_in % block == 0)
        if not counts:
            raise ValueError(f"{num_in} inputs cannot be divided by {BLOCKS[0]}")
        rules = {
            "weight": TensorRule(((size // 2, 1), (1, size // 2)), ("U8",)),
            "weight.absmax": TensorRule(counts, ("U8",) if self.is_nested else ("F32",)),
            "weight.quant_map": TensorRule(((16,),), ("F32",)),
            self._state: TensorRule((), ("U8",), max_length=MAX_STATE),
        }
        if self.is_nested:
            rules["weight.nested_absmax"] = TensorRule((), ("F32",), max_length=size)
            rules["weight.nested_quant_map"] = TensorRule(((256,),), ("F32",))
        return rules

    def load(self, fetch: Fetch, parts: Sequence[str]) -> TableWeight:
        read = [self._read(fetch, part) for part in parts]
        if any(each.group != read[0].group or each.shape[1] != read[0].shape[1] for each in read):
            raise ValueError(f"the blocks of {parts[0]} and {parts[1]} differ")
        codes, scales = [each.codes for each in read], [each.scales for each in read]
        return replace(read[0], codes=joined(codes), scales=joined(scales))

    def _read(self, fetch: Fetch, part: str) -> TableWeight:
        table = TABLES[self.kind]
        values, name = fetch(f"{part}.weight.quant_map"), f"{part}.{self._state}"
        if not torch.allclose(values, torch.tensor(table.values), rtol=0, atol=1e-4):
            raise ValueError(f"tensor {part}.weight.quant_map is not the table of {self.kind}")
        state = _read_state(name, fetch(name))
        packed, num_out, num_in = fetch(f"{part}.weight"), *_shape(name, state)
        absmax, block = self._absmax(fetch, part, name, state), state.get("blocksize")
        if type(block) is not int or block not in BLOCKS or num_in % block:
            raise ValueError(f"tensor {name}: blocksize {block!r} does not fit {num_in} inputs")
        if packed.numel() * 2 != num_out * num_in or absmax.numel() * block != num_out * num_in:
            raise ValueError(f"tensor {name}: shape {[num_out, num_in]} does not fit the weight")
        codes = byte_nibbles(packed.reshape(num_out, num_in // 2), is_low_first=False)
        group, times = kernel_group(block, num_in)
        scales = absmax.reshape(num_out, -1).repeat_interleave(times, 1)
        return TableWeight(codes, scales, group, table)

    def _absmax(self, fetch: Fetch, part: str, name: str, state: Config) -> Tensor:
        absmax = fetch(f"{part}.weight.absmax")
        if not self.is_nested:
            return checked_scales(f"{part}.weight.absmax", absmax)
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or not 0 < size <= BLOCKS[-1]:
            raise ValueError(f"tensor {name}: nested_blocksize {size!r} is not supported")
        if type(offset) not in (int, float):
            raise ValueError(f"tensor {name}: nested_offset {offset!r} is not a number")
        outer = fetch(f"{part}.weight.nested_absmax")
        if outer.numel() != -(-absmax.numel() // size):
            raise ValueError(
                f"tensor {part}.weight.nested_absmax has {outer.numel()} scales for "
                f"{absmax.numel()} blocks in groups of {size}"
            )
        values = fetch(f"{part}.weight.nested_quant_map")[absmax.int()]
        nested = outer.repeat_interleave(size)[: absmax.numel()]
        return checked_scales(f"{part}.weight.absmax", values * nested + float(str(offset)))


@dataclass(frozen=True, slots=True)
class Int8:
    """LLM.int8: int8 per output. Activations are int8, too, without its outliers in fp16."""

    markers: tuple[str, ...] = ("SCB",)
    ignored: tuple[str, ...] = ()
    loss: str | None = None
    bits: int = 8

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        return {
            "weight": TensorRule(((num_out, num_in),), ("I8",)),
            "SCB": TensorRule(((num_out,),), ("F32",)),
            "weight_format": TensorRule(((), (1,)), ("U8",), is_optional=True),
        }

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight8:
        return joined_8([self._read(fetch, part) for part in parts])

    @property
    def unit(self) -> int:
        return 1

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return stored if ending == "weight_format" else stored[outputs]

    def _read(self, fetch: Fetch, part: str) -> Weight8:
        weight, name = fetch(f"{part}.weight"), f"{part}.weight_format"
        scales = checked_scales(f"{part}.SCB", fetch(f"{part}.SCB")) / 127
        try:
            layout = int(fetch(name))
        except KeyError:
            layout = 0
        if layout:  # another order of bytes, which old versions wrote
            raise ValueError(f"tensor {name} is {layout}; only 0 (rows) is supported")
        return Weight8(weight, scales[:, None], weight.shape[1])


def _read_state(name: str, stored: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tensor {name} is not JSON") from error
    if not isinstance(state, dict):
        raise ValueError(f"tensor {name} is not a JSON object")
    return state


def _shape(name: str, state: Config) -> tuple[int, int]:
    shape = state.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(f"tensor {name} has no shape of a product")
    return shape[0], shape[1]


def read_bitsandbytes(config: Config) -> CheckpointFormat:
    """Reads quant_method bitsandbytes."""
    for key in ("load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit"):
        expect(config, key, (True, False, None))
    if config.get("load_in_8bit", config.get("_load_in_8bit")):
        expect(config, "llm_int8_has_fp16_weight", (False, None))
        return several(METHOD, [Int8()], METHOD)
    if not config.get("load_in_4bit", config.get("_load_in_4bit")):
        raise wrong("load_in_4bit", False, "True, or load_in_8bit")
    expect(config, "bnb_4bit_quant_type", (*TABLES, None))
    expect(config, "bnb_4bit_quant_storage", ("uint8", None))
    kind = config.get("bnb_4bit_quant_type") or "fp4"
    is_nested = bool(config.get("bnb_4bit_use_double_quant"))
    # some files were saved with other settings than their config.json says
    formats = [FourBits(kind, nested) for nested in (is_nested, not is_nested)]
    return several(METHOD, formats, METHOD)
