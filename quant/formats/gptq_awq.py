"""GPTQ and AWQ: words of 32 bits along the inputs, or along the outputs.

    gptq    qweight int32 [in x bits / 32, out], the inputs of a word from the lowest bits on
    awq     qweight int32 [in, out / 8], eight outputs to a word, in AWQ_ORDER
    both    qzeros int32 [groups, out x bits / 32] packed alike (gptq: lowest bits first),
            scales [groups, out]; gptq also g_idx [in], the group of each input

4 bits are computed as they are. 8 bits of GPTQ are, too, if they are symmetric and all inputs share
a scale; otherwise they are rounded to int8 with a scale per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ops.backend import INT4_GROUPS
from quant.formats.base import (
    FLOATS,
    CheckpointFormat,
    Config,
    Fetch,
    ProductFormat,
    TensorRule,
    checked_scales,
    expect,
    optional,
    several,
    words_of,
    wrong,
    zero_points_of,
)
from quant.formats.weights import (
    ROUNDED,
    Weight4,
    Weight8,
    byte_nibbles,
    joined_8,
    joined_int4,
    kernel_group,
)
from quant.int4 import Int4Weight

Ordered = TypeVar("Ordered", Weight4, Weight8)

# AutoAWQ puts output AWQ_ORDER[i] of eight into the i-th four bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FROM_LOWEST = range(8)


@dataclass(frozen=True, slots=True)
class GroupedInt:
    """GPTQ or AWQ.

    group_size: inputs that share a scale, -1 for all. zero_offset is added to every stored zero
    point. has_order: g_idx assigns inputs to groups and must be present.
    """

    method: str
    group_size: int
    bits: int = 4
    zero_offset: int = 0
    has_order: bool = False
    is_symmetric: bool = False
    markers: tuple[str, ...] = ("qweight",)
    ignored: tuple[str, ...] = ()

    @property
    def loss(self) -> str | None:
        is_exact = self.bits == 4 or (self.group_size == -1 and self.is_symmetric)
        return None if is_exact else f"8-bit weights in groups {ROUNDED}"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        size, to_word = self._size(num_in), 32 // self.bits
        for what, number, by in (("inputs", num_in, size), ("outputs", num_out, to_word)):
            if number % by or number % to_word:
                raise ValueError(f"{number} {what} cannot be divided by {by}")
        groups = num_in // size
        is_gptq = self.method == "gptq"
        words = (num_in // to_word, num_out) if is_gptq else (num_in, num_out // to_word)
        rules = {
            "qweight": TensorRule((words,), ("I32",)),
            "qzeros": TensorRule(((groups, num_out // to_word),), ("I32",)),
            "scales": TensorRule(((groups, num_out),), FLOATS),
        }
        if is_gptq:
            is_optional = not self.has_order or groups == 1
            rules["g_idx"] = TensorRule(((num_in,),), ("I32",), is_optional)
        return rules

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4 | Weight8:
        if self.bits == 8:
            return joined_8(in_one_order([self._read8(fetch, part) for part in parts], parts))
        read = in_one_order([self._read4(fetch, part) for part in parts], parts)
        weight = joined_int4([each.weight for each in read])
        if weight.zeros is not None and bool((weight.zeros == 8).all()):
            weight = weight._replace(zeros=None)
        return Weight4(weight, read[0].order)

    @property
    def unit(self) -> int:
        return 32 // self.bits

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        words = words_of(outputs, self.unit)
        if ending == "qzeros":
            return zero_points_of(stored, stored[:, words])
        if ending == "g_idx":
            return stored
        return stored[:, words if ending == "qweight" and self.method == "awq" else outputs]

    def _size(self, num_in: int) -> int:
        return num_in if self.group_size == -1 else self.group_size

    def _read4(self, fetch: Fetch, part: str) -> Weight4:
        words, zeros = fetch(f"{part}.qweight"), fetch(f"{part}.qzeros")
        scales = checked_scales(f"{part}.scales", fetch(f"{part}.scales")).t()
        order = None
        if self.method == "gptq":
            codes = nibbles(words.t().contiguous())
            # added to whole words, as GPTQModel does: the carry of a 15 undoes its borrow
            zeros = nibbles(zeros + 0x11111111 * self.zero_offset).t()
            order = self._order(fetch, part, codes.shape[1])
        else:
            codes, zeros = nibbles(words, AWQ_ORDER).t(), nibbles(zeros, AWQ_ORDER).t()
        return grouped_int4(codes, scales, zeros, self._size(codes.shape[1]), order)

    def _read8(self, fetch: Fetch, part: str) -> Weight8:
        words, zeros = fetch(f"{part}.qweight"), fetch(f"{part}.qzeros")
        scales = checked_scales(f"{part}.scales", fetch(f"{part}.scales")).t()
        codes = words.t().contiguous().view(torch.uint8)
        zeros = (zeros + 0x01010101 * self.zero_offset).contiguous().view(torch.uint8).t()
        order = self._order(fetch, part, codes.shape[1])
        return grouped_int8(codes, scales, zeros, self._size(codes.shape[1]), order)

    def _order(self, fetch: Fetch, part: str, num_in: int) -> Tensor | None:
        name = f"{part}.g_idx"
        return group_order(name, optional(fetch, name), num_in, self._size(num_in))


def grouped_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, size: int, order: Tensor | None
) -> Weight4:
    """Returns a 4-bit weight of groups of `size` inputs, which are listed by order."""
    if order is not None:
        codes = codes[:, order]
    group, times = kernel_group(size, codes.shape[1])
    if times > 1:
        scales = scales.repeat_interleave(times, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(times, 1)
    zeros = None if zeros is None else zeros.contiguous()
    return Weight4(Int4Weight(codes.contiguous(), scales, zeros, group), order)


def grouped_int8(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, size: int, order: Tensor | None
) -> Weight8:
    """Returns an 8-bit weight of bytes. Zero points of 128, and missing ones, make it int8."""
    if zeros is None or bool((zeros == 128).all()):
        codes, zeros = (codes ^ 128).view(torch.int8), None
    if order is not None:
        groups = torch.empty_like(order)
        groups[order] = torch.arange(len(order)) // size
        order = groups
    return Weight8(codes, scales, size, None if zeros is None else zeros.float(), order)


def in_one_order(
    read: Sequence[Ordered], parts: Sequence[str], ending: str = "g_idx"
) -> Sequence[Ordered]:
    """Returns the weights. ValueError if the order of their inputs differs."""
    first = read[0].order
    for part, each in zip(parts, read, strict=True):
        order = each.order
        if order is not first and (order is None or first is None or not torch.equal(order, first)):
            raise ValueError(f"{part}.{ending} differs from that of {parts[0]}")
    return read


def group_order(name: str, groups: Tensor | None, num_in: int, size: int) -> Tensor | None:
    """Returns the inputs ordered by group, or None if they are already in order.

    groups: [in], the group of each input. ValueError unless each group has `size` inputs.
    """
    plain = torch.arange(num_in) // size
    if groups is None or torch.equal(groups.long(), plain):
        return None
    groups = groups.long()
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], plain):
        raise ValueError(f"{name} does not give every group {size} inputs")
    return order


def nibbles(words: Tensor, order: Sequence[int] = _FROM_LOWEST) -> Tensor:
    """Unpacks words: [n, m] int32 to [n, 8 m] uint8 below 16.

    The i-th four bits from the lowest are value order[i] of eight.
    """
    if order == _FROM_LOWEST:  # two passes instead of eight
        return byte_nibbles(words.contiguous().view(torch.uint8), is_low_first=True)
    out = torch.empty(words.shape[0], words.shape[1], 8, dtype=torch.uint8)
    parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    for i, place in enumerate(order):
        part = parts[..., i // 2]
        out[..., place] = part >> 4 if i % 2 else part & 15
    return out.flatten(1)


# -- config.json


def read_gptq(config: Config) -> CheckpointFormat:
    base = _gptq_format(config, "")
    formats = [base]
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise wrong("dynamic", dynamic, "an object of patterns")
    for pattern, settings in dynamic.items():
        if not isinstance(settings, dict):
            raise wrong(f"dynamic.{pattern[:80]}", settings, "an object of settings")
        if settings and not pattern.startswith("-:"):  # "-:" are plain products
            formats.append(_gptq_format({**config, **settings}, f"dynamic.{pattern[:80]}."))
    return several("gptq", formats, "dynamic")


def _gptq_format(config: Config, at: str) -> GroupedInt:
    expect(config, "bits", (4, 8), at)
    expect(config, "group_size", (*INT4_GROUPS, -1), at)
    expect(config, "pack_dtype", ("int32", None), at)
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise wrong(f"{at}checkpoint_format", layout, "'gptq' or 'gptq_v2'")
    expect(config, "desc_act", (True, False, None), at)
    return GroupedInt(
        "gptq",
        config["group_size"],
        config["bits"],
        zero_offset=1 if layout == "gptq" else 0,
        has_order=bool(config.get("desc_act")),
        is_symmetric=config.get("sym") is True,
    )


def read_auto_round(config: Config) -> CheckpointFormat:
    """Reads quant_method auto-round, whose files are in another method's format.

    extra_config has settings of single products.
    """
    packing = config.get("packing_format")
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise wrong("packing_format", packing, "'auto_round:auto_gptq' or 'auto_round:auto_awq'")
    expect(config, "data_type", ("int", None))
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise wrong("extra_config", extra, "an object of products")
    formats: list[ProductFormat] = []
    for at, settings in (("", {}), *((f"extra_config.{key[:80]}.", extra[key]) for key in extra)):
        if not isinstance(settings, dict):
            raise wrong(at[:-1], settings, "an object of settings")
        if settings.get("bits") == 16:  # a plain product
            continue
        if packing == "auto_round:auto_awq":
            awq = {**config, **settings, "version": "gemm", "zero_point": True}
            formats += read_awq(awq).formats
        else:
            formats.append(_gptq_format({**config, **settings, "desc_act": False}, at))
    return several("auto-round", formats, "extra_config")


def read_awq(config: Config) -> CheckpointFormat:
    # AutoAWQ's own files say w_bit and q_group_size
    bits = "w_bit" if "w_bit" in config else "bits"
    group_size = "q_group_size" if "q_group_size" in config else "group_size"
    expect(config, bits, (4,))
    expect(config, group_size, (*INT4_GROUPS, -1))
    expect(config, "pack_dtype", ("int32", None))
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise wrong("version", version, "'gemm'")
    expect(config, "zero_point", (True, None))
    return several("awq", [GroupedInt("awq", config[group_size])], "awq")
