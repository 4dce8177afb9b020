"""Reads a checkpoint's tensors for an exported graph: products are packed, the rest stays plain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops.backend import NO_FUSION, LinearOp
from serve.converter.capture import Captured
from serve.converter.graph import CONSTANT, Graph, Value, ancestors
from serve.converter.program import Lookup, Product, compute_constants
from serve.converter.stage import Weights
from serve.errors import ModelLoadError
from serve.models.checkpoint import FLOATS, Checkpoint
from serve.models.progress import LoadProgress
from serve.models.shard import WHOLE, Shard
from serve.models.spec import ModelSpec
from serve.models.tensors import MakeLinear
from serve.models.weights import log_unused


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are kept. dtype: of what is not packed. weight_dtype: that products are cast to
    before they are packed; None: the file's. make_linear, make_head: pack them."""

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    make_linear: MakeLinear
    make_head: MakeLinear


class WeightReader:
    """Reads what one graph needs of a checkpoint."""

    def __init__(
        self,
        captured: Captured,
        graph: Graph,
        checkpoint: Checkpoint,
        packing: Packing,
        shard: Shard = WHOLE,
    ) -> None:
        self._captured, self._graph = captured, graph
        self._checkpoint, self._packing, self._shard = checkpoint, packing, shard
        self._ops: dict[tuple[str, ...], LinearOp] = {}
        self._stored = {captured.renamed(name): name for name in checkpoint.entries}
        self._names = self._find_names()

    def check(self, num_layers: int) -> None:
        """Raises ModelLoadError unless every tensor exists with its shape, and unused ones of the
        model's own modules are zero."""
        checkpoint, names = self._checkpoint, self._names
        shapes = {names[name]: self._captured.shapes[name] for name in names}
        checkpoint.expect(shapes)
        for name, shape in shapes.items():
            entry = checkpoint.entries.get(name)
            if entry is None:
                reason = ""
                if self._captured.is_regrouped:
                    reason = "; converter does not split or join tensors, as transformers does here"
                raise ModelLoadError(f"{checkpoint.path}: tensor {name} is missing{reason}")
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json "
                    f"asks for {list(shape)}"
                )
            if entry.dtype not in FLOATS:
                raise ModelLoadError(
                    f"{entry.file}: tensor {name} has type {entry.dtype}; only "
                    f"{', '.join(FLOATS)} can be loaded"
                )
        modules = {name.rpartition(".")[0] for name in shapes}
        unused = sorted(checkpoint.entries.keys() - shapes.keys())
        for name in unused:
            is_own = name.rpartition(".")[0] in modules and not name.endswith("inv_freq")
            if is_own and not checkpoint.is_zero(name):
                raise ModelLoadError(
                    f"{checkpoint.entries[name].file}: tensor {name} is not zero, but this model "
                    "has no use for it; config.json does not fit the tensors"
                )
        log_unused(unused, num_layers)

    def read(self, spec: ModelSpec, used: Set[Value], progress: LoadProgress) -> Weights:
        """Reads and packs what the values `used` need, layer by layer. spec: the whole model's."""
        functions: dict[Value, Callable[..., Any]] = {}
        values = [value for value in self._graph.values if value in used]
        parts = iter(_by_layer(values))
        for _ in progress.layers(spec, self._shard.numbers(spec.num_layers)):
            for value in next(parts):
                functions[value] = self._function(value)
            self._checkpoint.release()
        needed = _plain(values)
        constants = compute_constants(
            ancestors(needed),
            {x.tensor: self._tensor(x.tensor) for x in ancestors(needed) if x.tensor},
        )
        self._checkpoint.release()
        plain = {value: constants[value] for value in needed}
        return Weights(plain, functions, self._shard)

    def _function(self, value: Value) -> Callable[..., Any]:
        names = tuple(each.tensor for each in value.inputs if each.tensor)
        if value.is_lookup:
            return Lookup(self._fetch(names[0]).clone(), self._packing.dtype)
        if names not in self._ops:
            make = self._packing.make_linear
            if names[0] == self._captured.head:
                make = self._packing.make_head
            whole = [self._fetch(name) for name in names]
            total, shard = len(whole[0]), self._shard
            is_divided = 1 < shard.size <= total
            rows = shard.bounds(total)[shard.rank :][:2] if is_divided else (0, total)
            weight, *bias = (self._cast(each[slice(*rows)]) for each in whole)
            op = make([weight], bias[0] if bias else None, NO_FUSION)
            self._ops[names] = shard.linear(op, total) if is_divided else op
        return Product(self._ops[names], is_shared=self._shard.size > 1)

    def _tensor(self, name: str) -> Tensor:
        if name in self._captured.buffers:
            return self._captured.buffers[name]
        # a copy, so that the file can be unmapped
        return self._fetch(name).to(self._packing.dtype, copy=True)

    def _fetch(self, name: str) -> Tensor:
        return self._checkpoint.fetch(self._names[name])

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._packing.weight_dtype or tensor.dtype)

    def _find_names(self) -> dict[str, str]:
        """Returns where the checkpoint has each parameter of the graph."""
        used = {
            x.tensor for x in self._graph.values if x.tensor and x.tensor in self._captured.shapes
        }
        return {name: self._find(name) for name in sorted(used)}

    def _find(self, name: str) -> str:
        prefix = self._captured.prefix
        source = self._captured.ties.get(name)
        for each in (name, source):
            if each is not None:
                for found in (each, each.removeprefix(prefix), f"{prefix}{each}"):
                    if found in self._stored:
                        return self._stored[found]
        return source or name  # a random checkpoint has it when it is asked for it


def _by_layer(values: Sequence[Value]) -> list[list[Value]]:
    """Returns products and lookups in parts, one for each attention."""
    parts: list[list[Value]] = [[] for value in values if value.is_attention]
    done = 0
    for value in values:
        done += value.is_attention
        if value.is_product or value.is_lookup:
            parts[min(done, len(parts) - 1)].append(value)
    return parts


def _plain(values: Iterable[Value]) -> list[Value]:
    """Returns the constants that values need, but for packed weights and tables."""
    found: dict[Value, None] = {}
    for value in values:
        if value.kind == CONSTANT:
            continue
        inputs = value.inputs
        if value.is_product or value.is_lookup:
            inputs = tuple(each for each in inputs if not each.tensor)
        found |= dict.fromkeys(each for each in inputs if each.kind == CONSTANT)
    return list(found)
