"""One rank's part of a model: some layers, and some heads and columns of each.

Products are divided by their outputs (ops/sharded.py): q, k and v by whole heads, which stay on
their rank, all others by columns, which every rank gets from all. A rank needs whole rows only
between two products, so norms, routers and the hidden state are computed by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ops.backend import ExpertsOp, LinearOp
from ops.sharded import Columns, Exchange, PhasedExperts, ShardedExperts, ShardedLinear
from serve.errors import ConfigError
from serve.models.families.layer_spec import AttentionSpec, LatentSpec, LayerSpec
from serve.models.parts import Part, Rows
from serve.models.spec import ModelSpec

# Columns are divided in multiples of this, where there are enough, so that the panels of the
# kernels are full.
_UNIT = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds.

    rank, size: its place among the ranks that divide each layer. layers: the first layer and their
    number; None: all. exchange: shares columns with the other ranks; None for one rank.
    """

    rank: int = 0
    size: int = 1
    layers: tuple[int, int] | None = None
    exchange: Exchange | None = None

    def numbers(self, num_layers: int) -> range:
        """Returns the numbers of this rank's layers."""
        first, count = self.layers or (0, num_layers)
        return range(first, first + count)

    def is_first(self, num_layers: int) -> bool:
        return self.numbers(num_layers).start == 0

    def is_last(self, num_layers: int) -> bool:
        return self.numbers(num_layers).stop == num_layers

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """Returns the spec of this rank's layers with its heads. ConfigError if heads cannot be
        divided, or if a layer reads the K/V of a layer on another rank."""
        if self.size == 1 and self.layers is None:
            return whole
        numbers = self.numbers(whole.num_layers)
        layers = tuple(self._layer(whole, number) for number in numbers)
        # the first rank of the last stage, which is the engine's, has the whole head
        has_head = self.rank == 0 and self.is_last(whole.num_layers)
        return replace(whole, layers=layers, draft_head=whole.draft_head if has_head else None)

    def _layer(self, whole: ModelSpec, number: int) -> LayerSpec:
        layer = whole.layers[number]
        if layer.attention is None:
            return layer
        attention = self.attention(layer.attention)
        first = self.numbers(whole.num_layers).start
        if isinstance(attention, AttentionSpec) and attention.shares is not None:
            if attention.shares < first:
                raise ConfigError(
                    f"pipeline_parallel_size: layer {number} reads the K/V of layer "
                    f"{attention.shares}, so one stage must hold both"
                )
            attention = replace(attention, shares=attention.shares - first)
        return replace(layer, attention=attention)

    def attention(self, spec: AttentionSpec | LatentSpec) -> AttentionSpec | LatentSpec:
        """Returns the attention of this rank's heads."""
        if self.size == 1:
            return spec
        check_heads(spec, self.size)
        if isinstance(spec, LatentSpec):
            return replace(spec, num_heads=spec.num_heads // self.size)
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
        )

    def bounds(self, total: int, unit: int = 0) -> list[int]:
        """Returns where each rank's columns begin, and the end; unit: what stays together."""
        unit = unit or (_UNIT if total >= _UNIT * self.size else 1)
        units = -(-total // unit)
        return [min(total, units * rank // self.size * unit) for rank in range(self.size + 1)]

    def columns(self, total: int, unit: int = 0) -> Columns:
        assert self.exchange is not None, "a shard of several ranks has an exchange"
        return Columns(self.exchange, self.bounds(total, unit))

    def part(self, part: Part, unit: int = 0) -> Part:
        """Returns this rank's rows of the rows that a part takes."""
        if self.size == 1:
            return part
        bounds = self.bounds(part.num_taken, unit)
        return replace(part, rows=_subset(part, slice(bounds[self.rank], bounds[self.rank + 1])))

    def own_rows(self, tensor: Tensor | None) -> Tensor | None:
        """Returns this rank's rows of a tensor with one for each head."""
        if tensor is None:
            return None
        count = len(tensor) // self.size
        return tensor[self.rank * count : (self.rank + 1) * count].contiguous()

    def heads(self, part: Part, num_heads: int) -> Part:
        """Returns the rows of this rank's heads of a part that takes the rows of num_heads."""
        return self.part(part, part.num_taken // num_heads)

    def ups(self, parts: Sequence[Part], *, is_gated: bool) -> list[Part]:
        """Returns this rank's rows of gate and up, or of up."""
        if self.size == 1:
            return list(parts)
        if is_gated and len(parts) == 1:
            (whole,) = parts
            half = whole.num_taken // 2
            parts = [
                replace(whole, rows=_subset(whole, rows))
                for rows in (slice(0, half), slice(half, 2 * half))
            ]
        return [self.part(part) for part in parts]

    def linear(
        self, op: LinearOp, num_out: int, *, num_in: int | None = None, in_unit: int = 0
    ) -> LinearOp:
        """Returns a product of whole results, of which `op` gives this rank's. num_in: its rows
        are divided too, in multiples of in_unit."""
        if self.size == 1 or op is None:  # None while names are only noted
            return op
        inputs = None if num_in is None else self.columns(num_in, in_unit)
        return ShardedLinear(op, self.columns(num_out), inputs)

    def experts(self, op: ExpertsOp, between: int, num_out: int) -> ExpertsOp:
        """Returns experts of whole results, of which `op` gives this rank's; between: the columns
        between up and down."""
        if self.size == 1 or op is None:
            return op
        assert isinstance(op, PhasedExperts), f"{type(op).__name__} cannot be divided"
        return ShardedExperts(op, self.columns(between), self.columns(num_out))


WHOLE = Shard()


def check_heads(spec: AttentionSpec | LatentSpec, size: int) -> None:
    """Raises ConfigError unless whole heads, and whole K/V heads, can be divided among ranks."""
    counts = {"attention heads": spec.num_heads}
    if isinstance(spec, AttentionSpec):
        counts["key/value heads"] = spec.num_kv_heads
    for name, count in counts.items():
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size {size}: the model's {count} {name} cannot be divided among "
                f"{size} ranks"
            )


def _subset(part: Part, chosen: slice) -> Rows:
    """Returns some of the rows that a part takes."""
    if part.rows is None:
        return chosen
    if isinstance(part.rows, slice):
        rows = range(*part.rows.indices(part.num_rows))[chosen]
        return slice(rows.start, rows.stop, rows.step)
    return part.rows[chosen]
