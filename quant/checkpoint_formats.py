"""Quantized Hugging Face checkpoints: checks of config.json, tensors of a product, unpacking.

Checkpoints keep their scales; weights are not rounded again.

    compressed-tensors  int-quantized W8A8: weight int8 [out, in], weight_scale [out, 1]
    gptq                qweight int32 [in / 8, out], eight inputs to a word, the lowest bits first
    awq                 qweight int32 [in, out / 8], eight outputs to a word, in AWQ_ORDER
    both                qzeros int32 [groups, out / 8] packed alike (gptq: lowest bits first),
                        scales [groups, out]; gptq also g_idx [in], the group of each input

Functions raise a ValueError that names the key or tensor. This module knows names of tensors, no
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ops.backend import INT4_GROUPS, NO_FUSION, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_quantized_linear import NATIVE
from quant.int4 import Int4Weight

Config = Mapping[str, Any]
Fetch = Callable[[str], Tensor]  # KeyError for a missing tensor

# AutoAWQ puts output AWQ_ORDER[i] of eight into the i-th four bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOATS = ("F32", "BF16", "F16")
MAX_SCALE = 65504.0  # the largest fp16, the type of stored scales


class TensorRule(NamedTuple):
    """The allowed shapes and safetensors types of a tensor."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


class PackedWeight(Protocol):
    """The unpacked quantized weights of one product."""

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp: ...

    def plain(self) -> Tensor:
        """Returns the dequantized weight, [out, in] fp32."""

    def rows(self, order: Tensor) -> PackedWeight:
        """Returns the outputs `order`, [n] int64, in this order."""

    def scaled(self, factor: float) -> PackedWeight:
        """Returns the weight times factor."""


class CheckpointFormat(Protocol):
    """The storage format of quantized products. method: the checkpoint's quant_method."""

    @property
    def method(self) -> str: ...

    @property
    def marker(self) -> str:
        """The ending of a tensor that marks a quantized product."""

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        """Returns the tensors of a product by ending. ValueError if its size is not supported."""

    def load(self, fetch: Fetch, parts: Sequence[str]) -> PackedWeight:
        """Loads the named products, concatenated along the output."""


def read_format(config: Config) -> CheckpointFormat:
    """Reads config.json's quantization_config. ValueError names an unsupported key."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return read_compressed_tensors(config)
    if method == "gptq":
        return read_gptq(config)
    if method == "awq":
        return read_awq(config)
    raise _wrong("quant_method", method, "compressed-tensors, gptq or awq")


def _wrong(key: str, value: object, supported: str) -> ValueError:
    return ValueError(f"{key} {value!r} is not supported; only {supported}")


def _expect(config: Config, key: str, allowed: tuple[object, ...], at: str = "") -> None:
    value = config.get(key)
    # True == 1, but a flag is not a number
    if not any(value == item and type(value) is type(item) for item in allowed):
        names = " or ".join(repr(item) for item in allowed if item is not None)
        raise _wrong(at + key, value, names or "none")


# -- compressed-tensors


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A W8A8 weight. weight: [out, in] int8; scales: [out] fp32."""

    weight: Tensor
    scales: Tensor

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        return linears.int8([self.weight], bias, fusion, scales=self.scales)

    def plain(self) -> Tensor:
        return self.weight.float().mul_(self.scales[:, None])


@dataclass(frozen=True, slots=True)
class CompressedInt8:
    """W8A8: int8 weights per channel (or tensor), activations per token at run time."""

    method: str = "compressed-tensors"
    marker: str = "weight_scale"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        scales = TensorRule(((num_out, 1), (num_out,), (1,), ()), FLOATS)
        return {"weight": TensorRule(((num_out, num_in),), ("I8",)), "weight_scale": scales}

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Int8Weight:
        weights = [fetch(f"{part}.weight") for part in parts]
        scales = [
            _scales(fetch, f"{part}.weight_scale").reshape(-1).expand(len(weight))
            for part, weight in zip(parts, weights, strict=True)
        ]
        return Int8Weight(_joined(weights), torch.cat(scales))


def read_compressed_tensors(config: Config) -> CompressedInt8:
    _expect(config, "format", ("int-quantized",))
    _expect(config, "quantization_status", ("compressed", None))
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise _wrong(key, config[key], "none")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _wrong("sparsity_config.format", sparsity["format"], "'dense'")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups is missing")
    for name, group in groups.items():
        _check_group(f"config_groups.{name}.", group)
    return CompressedInt8()


def _check_group(at: str, group: Config) -> None:
    """Checks that a group has W8A8 weights and activations."""
    if not isinstance(group, dict):
        raise ValueError(f"{at[:-1]} must be an object")
    _expect(group, "format", ("int-quantized", None), at)
    if group.get("output_activations"):
        raise _wrong(f"{at}output_activations", group["output_activations"], "none")
    for key, strategies, is_dynamic in (
        ("weights", ("channel", "tensor"), (False, None)),
        ("input_activations", ("token",), (True,)),
    ):
        scheme = group.get(key)
        if not isinstance(scheme, dict):
            raise _wrong(f"{at}{key}", scheme, "8-bit integers")
        inside = f"{at}{key}."
        _expect(scheme, "num_bits", (8,), inside)
        _expect(scheme, "type", ("int", None), inside)
        _expect(scheme, "symmetric", (True, None), inside)
        _expect(scheme, "strategy", strategies, inside)
        _expect(scheme, "dynamic", is_dynamic, inside)
        _expect(scheme, "actorder", (None,), inside)


# -- GPTQ and AWQ


class Reordered:
    """A product with reordered inputs (GPTQ's order by decreasing activations)."""

    def __init__(self, op: LinearOp, order: Tensor) -> None:
        self._op, self._order = op, order

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._order.device != x.device:
            self._order = self._order.to(x.device)
        return self._op(x.index_select(1, self._order), residual)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A 4-bit weight. order: the input of each column of codes, None for their own order."""

    weight: Int4Weight
    order: Tensor | None

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        if self.order is None:
            return self.weight.linear(bias, fusion, linears)
        norm = fusion.norm
        if norm is not None:
            order = self.order.to(norm.weight.device)
            norm_bias = None if norm.bias is None else norm.bias[order]
            norm = norm._replace(weight=norm.weight[order], bias=norm_bias)
        return Reordered(self.weight.linear(bias, fusion._replace(norm=norm), linears), self.order)

    def plain(self) -> Tensor:
        weight = self.weight.plain()
        return weight if self.order is None else weight[:, self.order.argsort()]


@dataclass(frozen=True, slots=True)
class GroupedInt4:
    """GPTQ or AWQ with 4 bits.

    group_size: inputs that share a scale, -1 for all. zero_offset is added to every stored zero
    point. has_order: g_idx assigns inputs to groups and must be present.
    """

    method: str
    group_size: int
    zero_offset: int = 0
    has_order: bool = False
    marker: str = "qweight"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        size = num_in if self.group_size == -1 else self.group_size
        for what, number, by in (("inputs", num_in, size), ("outputs", num_out, 8)):
            if number % by or number % 8:
                raise ValueError(f"{number} {what} cannot be divided by {by}")
        groups = num_in // size
        words = (num_in // 8, num_out) if self.method == "gptq" else (num_in, num_out // 8)
        rules = {
            "qweight": TensorRule((words,), ("I32",)),
            "qzeros": TensorRule(((groups, num_out // 8),), ("I32",)),
            "scales": TensorRule(((groups, num_out),), FLOATS),
        }
        if self.method == "gptq":
            is_optional = not self.has_order or groups == 1
            rules["g_idx"] = TensorRule(((num_in,),), ("I32",), is_optional)
        return rules

    def load(self, fetch: Fetch, parts: Sequence[str]) -> GroupedWeight:
        read = [self._read(fetch, part) for part in parts]
        orders = [order for _, order in read]
        for part, order in zip(parts, orders, strict=True):
            if not _is_same(order, orders[0]):
                raise ValueError(f"{part}.g_idx differs from that of {parts[0]}")
        weights = [weight for weight, _ in read]
        zeros = _joined([_given(weight.zeros) for weight in weights])
        joined = Int4Weight(
            _joined([weight.codes for weight in weights]),
            _joined([weight.scales for weight in weights]),
            None if bool((zeros == 8).all()) else zeros,
            weights[0].group,
        )
        return GroupedWeight(joined, orders[0])

    def _read(self, fetch: Fetch, part: str) -> tuple[Int4Weight, Tensor | None]:
        words, zeros = fetch(f"{part}.qweight"), fetch(f"{part}.qzeros")
        scales = _scales(fetch, f"{part}.scales").t()
        if self.method == "gptq":
            codes = nibbles(words.t().contiguous())
            # added to whole words, as GPTQModel does: the carry of a 15 undoes its borrow
            zeros = nibbles(zeros + 0x11111111 * self.zero_offset).t()
            order = self._order(fetch, part, codes.shape[1])
        else:
            codes, zeros = nibbles(words, AWQ_ORDER).t(), nibbles(zeros, AWQ_ORDER).t()
            order = None
        if order is not None:
            codes = codes[:, order]
        group = self.group_size
        if group == -1:  # one scale for all inputs
            group = INT4_GROUPS[-1]
            count = -(-codes.shape[1] // group)
            scales, zeros = scales.expand(-1, count), zeros.expand(-1, count)
        return Int4Weight(codes.contiguous(), scales, zeros.contiguous(), group), order

    def _order(self, fetch: Fetch, part: str, num_in: int) -> Tensor | None:
        """Returns the inputs ordered by group, or None if they are already in order."""
        size = num_in if self.group_size == -1 else self.group_size
        try:
            groups = fetch(f"{part}.g_idx").long()
        except KeyError:
            return None
        plain = torch.arange(num_in) // size
        if torch.equal(groups, plain):
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], plain):
            raise ValueError(f"{part}.g_idx does not give every group {size} inputs")
        return order


def read_gptq(config: Config) -> GroupedInt4:
    _expect_int4(config, "bits", "group_size")
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _wrong("checkpoint_format", layout, "'gptq' or 'gptq_v2'")
    if config.get("dynamic"):  # layers with settings of their own
        raise _wrong("dynamic", config["dynamic"], "none")
    _expect(config, "desc_act", (True, False, None))
    offset = 1 if layout == "gptq" else 0
    return GroupedInt4("gptq", config["group_size"], offset, has_order=bool(config.get("desc_act")))


def read_awq(config: Config) -> GroupedInt4:
    # AutoAWQ's own files say w_bit and q_group_size
    bits = "w_bit" if "w_bit" in config else "bits"
    group_size = "q_group_size" if "q_group_size" in config else "group_size"
    _expect_int4(config, bits, group_size)
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _wrong("version", version, "'gemm'")
    _expect(config, "zero_point", (True, None))
    return GroupedInt4("awq", config[group_size])


def _expect_int4(config: Config, bits: str, group_size: str) -> None:
    _expect(config, bits, (4,))
    _expect(config, group_size, (*INT4_GROUPS, -1))
    _expect(config, "pack_dtype", ("int32", None))


def nibbles(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Unpacks words: [n, m] int32 to [n, 8 m] uint8 below 16.

    The i-th four bits from the lowest are value order[i] of eight.
    """
    out = torch.empty(words.shape[0], words.shape[1], 8, dtype=torch.uint8)
    parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    for i, place in enumerate(order):
        part = parts[..., i // 2]
        out[..., place] = part >> 4 if i % 2 else part & 15
    return out.flatten(1)


def _scales(fetch: Fetch, name: str) -> Tensor:
    """Returns scales in fp32. ValueError for values that no quantizer writes."""
    scales = fetch(name).float()
    largest = float(scales.abs().max())
    if not largest <= MAX_SCALE:  # NaN is not
        raise ValueError(f"tensor {name} holds a scale of {largest:.4g}; {MAX_SCALE:g} is the most")
    if largest == 0.0:
        raise ValueError(f"tensor {name} holds only zeros; a product of such scales would be zero")
    return scales


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates parts along the output; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _given(zeros: Tensor | None) -> Tensor:
    assert zeros is not None, "both formats store zero points"
    return zeros
