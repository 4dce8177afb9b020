"""Builds the weights of layers with a state from a source of tensors."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ops.backend import Backend, Fusion, LinearOp
from ops.states import Recurrence
from serve.models.families.names import StateNames
from serve.models.families.state_spec import DeltaNetSpec, MambaSpec, ShortConvSpec, StateSpec
from serve.models.layers.blocks import AttentionHalf
from serve.models.layers.state import Conv, DeltaNet, Mamba, ShortConv
from serve.models.parts import Part
from serve.models.tensors import TensorSource


class StateAssembler:
    """Builds one layer, whose tensors' names begin with `at`."""

    def __init__(
        self,
        names: StateNames,
        at: str,
        hidden: int,
        source: TensorSource,
        backend: Backend,
        *,
        out_scale: float,
    ) -> None:
        """hidden: the size of the layer's input. out_scale multiplies its result."""
        self._names = names
        self._at = at
        self._hidden = hidden
        self._source = source
        self._backend = backend
        self._out_scale = out_scale

    def half(self, spec: StateSpec, number: int, fusion: Fusion) -> AttentionHalf:
        """number: the layer's number among those with states. fusion: the norm of its input."""
        if isinstance(spec, ShortConvSpec):
            return self._short_conv(spec, number, fusion)
        if isinstance(spec, DeltaNetSpec):
            return self._delta_net(spec, number, fusion)
        return self._mamba(spec, number, fusion)

    def _short_conv(self, spec: ShortConvSpec, number: int, fusion: Fusion) -> ShortConv:
        inputs = Part(self._at + self._names.inputs[0], 3 * spec.channels)
        return ShortConv(
            number=number,
            backend=self._backend,
            inputs=self._source.product(
                [inputs], self._hidden, has_bias=spec.has_bias, fusion=fusion
            ),
            conv=self._conv([spec.channels], spec.width, has_bias=spec.has_bias),
            o=self._out(spec.channels, has_bias=spec.has_bias),
        )

    def _delta_net(self, spec: DeltaNetSpec, number: int, fusion: Fusion) -> DeltaNet:
        source, names, at = self._source, self._names, self._at
        low_a = low_z = None
        if spec.rank is not None:
            size = spec.num_heads * spec.key_dim
            low_a = source.product([Part(at + names.low_a, size)], spec.rank)
            low_z = source.product([Part(at + names.low_z, spec.value_size)], spec.rank)
        decays = (spec.num_heads, spec.key_dim) if spec.has_channel_decay else (spec.num_heads,)
        return DeltaNet(
            number=number,
            spec=spec,
            backend=self._backend,
            inputs=source.product(self._delta_parts(spec), self._hidden, fusion=fusion),
            gates=self._plain(self._gate_parts(spec), fusion),
            conv=self._conv(
                [spec.key_size, spec.key_size, spec.value_size], spec.width, has_bias=False
            ),
            rule=Recurrence(
                rates=self._rates(spec.num_heads),
                bias=self._fp32(names.bias, decays),
                is_delta=True,
                scale=spec.key_dim**-0.5,
                has_unit_keys=True,
                beta_scale=spec.beta_scale,
            ),
            norm=self._norm((spec.value_dim,), spec.num_heads),
            o=self._out(spec.value_size),
            low_a=low_a,
            low_z=low_z,
        )

    def _delta_parts(self, spec: DeltaNetSpec) -> list[Part]:
        """Returns the parts of q, k, v and, at full rank, z."""
        modules = [self._at + module for module in self._names.inputs]
        if self._names.is_grouped:
            sizes = _grouped_sizes(spec)
            total = spec.num_key_heads * sum(sizes)
            return [
                Part(modules[0], total, _grouped_rows(spec.num_key_heads, sizes, part))
                for part in range(4)
            ]
        sizes = [spec.key_size, spec.key_size, spec.value_size, spec.value_size]
        if len(modules) <= 2:  # q, k and v are one tensor
            sizes = [spec.conv_size, spec.value_size]
        return [Part(module, size) for module, size in zip(modules, sizes, strict=False)]

    def _gate_parts(self, spec: DeltaNetSpec) -> list[Part]:
        """Returns the parts of b and a, or of b and the first products of low rank."""
        modules = [self._at + module for module in self._names.gates]
        if self._names.is_grouped:
            each = spec.num_heads // spec.num_key_heads
            return [
                Part(
                    modules[0],
                    2 * spec.num_heads,
                    _grouped_rows(spec.num_key_heads, [each, each], part),
                )
                for part in range(2)
            ]
        sizes = [spec.num_heads, spec.num_heads]
        if spec.rank is not None:
            sizes = [spec.num_heads, spec.rank, spec.rank]
        return [Part(module, size) for module, size in zip(modules, sizes, strict=True)]

    def _mamba(self, spec: MambaSpec, number: int, fusion: Fusion) -> Mamba:
        names = self._names
        scales, rates = None, self._rates(spec.num_heads)
        if spec.part_scales and rates is not None:  # None while names are only noted
            each = zip(spec.part_scales, spec.part_sizes, strict=True)
            scales = torch.cat([torch.full((size,), scale) for scale, size in each])
            scales = (scales * spec.in_scale).to(self._backend.device)
        inputs = Part(self._at + names.inputs[0], sum(spec.part_sizes))
        sizes = [spec.inner_size, 2 * spec.num_groups * spec.state_size]
        return Mamba(
            number=number,
            spec=spec,
            backend=self._backend,
            inputs=self._source.product(
                [inputs], self._hidden, has_bias=spec.has_bias, fusion=fusion
            ),
            conv=self._conv(sizes, spec.width, has_bias=spec.has_conv_bias),
            rule=Recurrence(
                rates=rates,
                bias=self._fp32(names.bias, (spec.num_heads,)),
                is_delta=False,
                scale=1.0,
                dt_min=spec.dt_min,
                dt_max=spec.dt_max,
                skip=self._fp32(names.skip, (spec.num_heads,)),
            ),
            norm=self._norm((spec.inner_size,)) if spec.norm_group else None,
            o=self._out(spec.inner_size, has_bias=spec.has_out_bias, scale=spec.out_scale),
            scales=scales,
        )

    # -- tensors

    def _out(self, num_in: int, *, has_bias: bool = False, scale: float = 1.0) -> LinearOp:
        return self._source.product(
            [Part(self._at + self._names.out, self._hidden)],
            num_in,
            has_bias=has_bias,
            scale=scale * self._out_scale,
        )

    def _plain(self, parts: list[Part], fusion: Fusion) -> LinearOp:
        """Packs a product that is not rounded: decays are exponents of what it gives."""
        weights = [self._source.matrix(part, self._hidden, stays_plain=True) for part in parts]
        weight = torch.cat(weights)
        if weight.is_meta:  # names are only noted
            return None  # type: ignore[return-value]
        # rows have the compute type, whatever the file has
        return self._backend.pack_linear(weight.to(self._source.ones(1).dtype), None, fusion)

    def _conv(self, sizes: list[int], width: int, *, has_bias: bool) -> Conv:
        """Reads a convolution of channels that are stored together, or as parts of these sizes."""
        modules = [self._at + module for module in self._names.convs]
        joint = self._at + self._names.joint_conv
        if self._names.joint_conv and self._source.has(f"{joint}.weight"):
            modules = [joint]
        if len(modules) == 1:
            sizes = [sum(sizes)]
        shapes = [self._source.shape(f"{module}.weight") for module in modules]
        stored = [shape[0] for shape in shapes if shape]
        if len(stored) == len(sizes) and sum(stored) == sum(sizes):
            sizes = stored  # Transformers writes equal parts, whatever they are
        weights = [
            self._source.vector(f"{module}.weight", (size, 1, width), dtype=torch.float32)
            for module, size in zip(modules, sizes, strict=True)
        ]
        biases = [
            self._source.vector(f"{module}.bias", (size,), dtype=torch.float32)
            for module, size in zip(modules, sizes, strict=True)
            if has_bias
        ]
        if weights[0] is None:
            return Conv(weights[0])
        return Conv(torch.cat(weights).flatten(1), torch.cat(biases) if biases else None)

    def _fp32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor, which may be stored with other dimensions of the same values."""
        stored = self._source.shape(self._at + name)
        if stored is None or prod(stored) != prod(shape):
            stored = shape
        found = self._source.vector(self._at + name, stored, dtype=torch.float32)
        return found if found is None else found.view(shape)

    def _rates(self, num_heads: int) -> Tensor:
        found = self._fp32(self._names.rates, (num_heads,))
        return found if found is None else found.exp()

    def _norm(self, shape: tuple[int, ...], times: int = 1) -> Tensor:
        name = f"{self._at}{self._names.norm}.weight"
        found = self._source.vector(name, shape, dtype=torch.float32)
        return found if found is None else found.repeat(times)


def _grouped_sizes(spec: DeltaNetSpec) -> list[int]:
    """Returns the rows of q, k, v and z of one key head."""
    values = spec.value_size // spec.num_key_heads
    return [spec.key_dim, spec.key_dim, values, values]


def _grouped_rows(num_heads: int, sizes: list[int], part: int) -> Tensor:
    """Returns the rows of one part where the parts of each head are side by side."""
    first, size = sum(sizes[:part]), sizes[part]
    heads = torch.arange(num_heads)[:, None] * sum(sizes)
    return (heads + first + torch.arange(size)).flatten()
