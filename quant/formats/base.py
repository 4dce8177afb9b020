"""What all formats of quantized checkpoints share: protocols, choice by tensors, checks of values.

A checkpoint's config.json names one or more formats. Which of them a product is stored in, or none,
is decided by the tensors in its files (names, types, shapes), and not by the lists of names and
regular expressions in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_quantized_linear import NATIVE

Config = Mapping[str, Any]
Form = TypeVar("Form")

FLOATS = ("F32", "BF16", "F16")
# Scales of K/V, which has a format of its own here.
KV_SCALES = ("output_scale", "q_scale", "k_scale", "v_scale")
# Scales of activations and of K/V, which are rounded at run time here, per token.
RUN_TIME_SCALES = ("input_scale", "input_global_scale", "activation_scale", *KV_SCALES)
MAX_SCALE = 65504.0  # the largest fp16, the type of most stored scales
MAX_FORMATS = 64  # more groups of a checkpoint are not the work of a quantizer


class Fetch(Protocol):
    """Reads tensors. KeyError for a missing one."""

    def __call__(self, name: str, index: int | None = None) -> Tensor:
        """Returns the tensor, or only the part [index] of its first dimension."""


class Stored(Protocol):
    """What a file's header says about a tensor: its shape, and its type in safetensors' words."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


Header = Mapping[str, Stored]


class TensorRule(NamedTuple):
    """The allowed shapes and safetensors types of a tensor. max_length: any tensor of one dimension
    up to that length is allowed, too."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    max_length: int = 0

    def allows(self, shape: tuple[int, ...]) -> bool:
        return shape in self.shapes or (len(shape) == 1 and 0 < shape[0] <= self.max_length)

    def fits(self, stored: Stored | None) -> bool:
        """Returns whether the tensor may be stored so; None for a missing one."""
        if stored is None:
            return self.is_optional
        return self.allows(stored.shape) and stored.dtype in self.dtypes


class PackedWeight(Protocol):
    """The unpacked quantized weights of one product."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp: ...

    def plain(self) -> Tensor:
        """Returns the dequantized weight, [out, in] fp32."""

    def scaled(self, factor: float) -> PackedWeight:
        """Returns the weight times a factor; codes stay as they are."""

    def rows(self, order: Tensor) -> PackedWeight:
        """Returns the outputs that order, int64, lists, in its order."""


class ProductFormat(Protocol):
    """The storage format of one quantized product.

    markers: endings of tensors that show that a product is stored so. ignored: endings of tensors
    that may be there and are not needed, such as scales of activations, which are rounded per token
    at run time here. loss: what the weights lose when they are loaded, for the user; None if their
    numbers stay as they are. bits: of a weight in memory, 4 or 8.
    """

    @property
    def bits(self) -> int: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    @property
    def loss(self) -> str | None: ...

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        """Returns the tensors of a product: f"{product}.{ending}" has the ending's rule.

        ValueError if its size is not supported.
        """

    def load(self, fetch: Fetch, parts: Sequence[str]) -> PackedWeight:
        """Loads the named products, concatenated along the output. ValueError names a tensor."""


@runtime_checkable
class CutFormat(Protocol):
    """A format of which some outputs can be loaded without reading the others.

    unit: outputs that are stored together. The bits are those of the whole product's rows.
    """

    @property
    def unit(self) -> int: ...

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        """Returns what a tensor of a product says about some outputs, whose start is a multiple of
        unit; the end is, too, or the number of outputs. ValueError if all are needed."""


@runtime_checkable
class SizedFormat(Protocol):
    """A format whose tensors do not show what they take in memory."""

    def memory_bytes(self, num_weights: int, *, has_superblocks: bool) -> float:
        """has_superblocks: as `QuantizedLinears` has it."""


class ExpertsFormat(ProductFormat, Protocol):
    """A ProductFormat which also stores all experts of a layer in one tensor."""

    @property
    def expert_markers(self) -> tuple[str, ...]:
        """Endings with their separator, as in "_blocks"."""

    def expert_tensors(
        self, num_experts: int, num_in: int, num_out: int, *, is_transposed: bool = False
    ) -> dict[str, TensorRule]:
        """Returns the tensors of all experts' products: f"{name}{ending}" has the ending's rule.
        is_transposed: plain weights of the model would be [experts, in, out]."""

    def load_expert(
        self, fetch: Fetch, name: str, expert: int, *, is_transposed: bool = False
    ) -> PackedWeight:
        """Loads one expert's product, and reads no other."""


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The formats of a quantized checkpoint. method: its quant_method."""

    method: str
    formats: tuple[ProductFormat, ...]

    @property
    def marker(self) -> str:
        """The ending of a tensor that a quantized product usually has, for messages."""
        return next((form.markers[0] for form in self.formats if form.markers), "weight")

    @property
    def bits(self) -> int:
        """The least number of bits of a quantized weight in memory."""
        return min(form.bits for form in self.formats)

    def has(self, header: Header, name: str) -> bool:
        """Returns whether a product, or fused experts, of that name are stored quantized."""
        return any(_has_any(header, name + ".", form.markers) for form in self.formats) or any(
            _has_any(header, name, form.expert_markers) for form in self._fused()
        )

    def of(self, header: Header, product: str, num_in: int, num_out: int) -> ProductFormat | None:
        """Returns the format of a product [num_out, num_in], or None if it is stored plain.

        If no format fits, it is the first of which a marker exists; its rules then name the tensor
        that is wrong.
        """

        def rules(form: ProductFormat) -> dict[str, TensorRule]:
            return form.tensors(num_in, num_out)

        marked = [f for f in self.formats if _has_any(header, product + ".", f.markers)]
        return _first_fitting(header, product + ".", marked, rules)

    def of_experts(
        self,
        header: Header,
        name: str,
        num_experts: int,
        num_in: int,
        num_out: int,
        *,
        is_transposed: bool = False,
    ) -> ExpertsFormat | None:
        """Returns the format of fused experts of [num_out, num_in] each, None if they are plain or
        not fused."""

        def rules(form: ExpertsFormat) -> dict[str, TensorRule]:
            return form.expert_tensors(num_experts, num_in, num_out, is_transposed=is_transposed)

        marked = [f for f in self._fused() if _has_any(header, name, f.expert_markers)]
        return _first_fitting(header, name, marked, rules)

    def _fused(self) -> Iterator[ExpertsFormat]:
        for form in self.formats:
            if hasattr(form, "load_expert"):
                yield form  # type: ignore[misc]


def _has_any(header: Header, start: str, endings: Sequence[str]) -> bool:
    return any(start + ending in header for ending in endings)


def _first_fitting(
    header: Header,
    start: str,
    marked: Sequence[Form],
    rules: Callable[[Form], dict[str, TensorRule]],
) -> Form | None:
    for form in marked if len(marked) > 1 else ():
        try:
            endings = rules(form)
        except ValueError:  # it has no products of that size
            continue
        if all(rule.fits(header.get(start + ending)) for ending, rule in endings.items()):
            return form
    return marked[0] if marked else None


# -- settings


def wrong(key: str, value: object, supported: str) -> ValueError:
    return ValueError(f"{key} {_short(value)} is not supported; only {supported}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def expect(config: Config, key: str, allowed: tuple[object, ...], at: str = "") -> None:
    """Raises ValueError unless the key's value is allowed; None allows a missing key."""
    value = config.get(key)
    # True == 1, but a flag is not a number
    if not any(value == item and type(value) is type(item) for item in allowed):
        names = " or ".join(repr(item) for item in allowed if item is not None)
        raise wrong(at + key, value, names or "none")


def expect_object(config: Config, key: str, at: str = "") -> Config:
    """Returns an object that must be there."""
    value = config.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{at}{key} must be an object, not {_short(value)}")
    return value


def several(method: str, formats: Sequence[ProductFormat], key: str) -> CheckpointFormat:
    """Returns a format of at least one and at most MAX_FORMATS, without repetitions."""
    unique = tuple(dict.fromkeys(formats))
    if not unique:
        raise ValueError(f"{key} has no quantized products")
    if len(unique) > MAX_FORMATS:
        raise ValueError(f"{key} has {len(unique)} formats; {MAX_FORMATS} are the most")
    return CheckpointFormat(method, unique)


# -- values


def checked_scales(name: str, scales: Tensor) -> Tensor:
    """Returns scales in fp32. ValueError for values that no quantizer writes."""
    scales = scales.float()
    largest = float(scales.abs().max()) if scales.numel() else 0.0
    if not largest <= MAX_SCALE:  # NaN is not
        raise ValueError(f"tensor {name} holds a scale of {largest:.4g}; {MAX_SCALE:g} is the most")
    if largest == 0.0:
        raise ValueError(f"tensor {name} holds only zeros; a product of such scales would be zero")
    return scales


def power_scales(name: str, exponents: Tensor) -> Tensor:
    """Returns 2^(e - 127) in fp32 for exponents as bytes or in e8m0. ValueError for NaN."""
    stored = exponents.view(torch.uint8).int()
    if bool((stored == 255).any()):
        raise ValueError(f"tensor {name} holds NaN")
    # the bits of fp32; 2^-127 is below its normal numbers
    bits = torch.where(stored > 0, stored << 23, 1 << 22)
    return checked_scales(name, bits.to(torch.int32).view(torch.float32))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts along the output; a single part is not copied if it is contiguous."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def rows_of(stored: Tensor, outputs: slice) -> Tensor:
    """Returns the rows of some outputs; one row for all outputs stays."""
    return stored if stored.ndim == 0 or len(stored) == 1 else stored[outputs]


def words_of(outputs: slice, count: int) -> slice:
    """Returns the places of outputs of which `count` share one."""
    return slice(outputs.start // count, -(-outputs.stop // count))


def zero_points_of(stored: Tensor, cut: Tensor) -> Tensor:
    """Returns the part `cut` of zero points. ValueError if only all of them show that they are no
    constant: products without zero points are computed in another way."""
    if bool((cut == cut.flatten()[0]).all()) and not bool((stored == cut.flatten()[0]).all()):
        raise ValueError("all zero points are needed")
    return cut


def optional(fetch: Fetch, name: str) -> Tensor | None:
    try:
        return fetch(name)
    except KeyError:
        return None
