"""Lists of operator calls over numbered slots, which run a graph with little overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import LinearOp
from serve.converter.graph import Value

Slots = list[Any]
_aten = torch.ops.aten
# functions that compute what the operators do, and are called faster
_FASTER: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.cat.default: torch.cat,
    _aten.cos.default: torch.cos,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.silu.default: functional.silu,
    _aten.sin.default: torch.sin,
    _aten.square.default: torch.square,
    _aten.sub.Tensor: torch.sub,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.reshape,  # a product's result may have other strides
}


class Product:
    """A linear layer over [.., in], computed by a packed product."""

    def __init__(self, op: LinearOp, *, is_shared: bool = False) -> None:
        """is_shared: its result may be a buffer that is written again before a graph is done with
        it (ops/sharded.py), and is copied."""
        self.op = op
        self._is_shared = is_shared

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = self.op(rows)
        if self._is_shared:
            out = out.clone()
        return out.reshape(*x.shape[:-1], -1)


class Lookup:
    """An embedding whose table may have another type than the rows."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._table).to(self._dtype)


class Call:
    """One operator with the slots of its arguments and of its result.

    frees: slots whose values nothing needs any more after the call.
    """

    __slots__ = ("_args", "_function", "_kwargs", "_nested", "_out", "_places", "frees")

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: int,
        slots: Mapping[Value, int],
    ) -> None:
        self._function, self._out = function, out
        self._args = list(args)
        self._places = [(i, slots[x]) for i, x in enumerate(args) if isinstance(x, Value)]
        # lists that hold values, such as shapes with the number of rows
        self._nested = [
            (i, list(x), [(j, slots[y]) for j, y in enumerate(x) if isinstance(y, Value)])
            for i, x in enumerate(args)
            if isinstance(x, list) and any(isinstance(y, Value) for y in x)
        ]
        self._kwargs = dict(kwargs)
        self.frees: tuple[int, ...] = ()

    def uses(self) -> list[int]:
        """Returns the slots of its arguments."""
        nested = [slot for _, _, places in self._nested for _, slot in places]
        return [slot for _, slot in self._places] + nested

    def __call__(self, slots: Slots) -> None:
        args = self._args.copy()
        for i, slot in self._places:
            args[i] = slots[slot]
        for i, items, places in self._nested:
            filled = items.copy()
            for j, slot in places:
                filled[j] = slots[slot]
            args[i] = filled
        slots[self._out] = self._function(*args, **self._kwargs)
        for slot in self.frees:
            slots[slot] = None


def make_call(
    value: Value, functions: Mapping[Value, Callable[..., Any]], slots: Mapping[Value, int]
) -> Call:
    """Returns the call that computes a value. functions: those of products and lookups, which take
    the rows alone."""
    out = slots[value]
    if value in functions:
        rows = value.args[1 if value.is_lookup else 0]
        return Call(functions[value], [rows], {}, out, slots)
    assert value.target is not None, f"{value.name} is an input"
    return Call(_FASTER.get(value.target, value.target), value.args, value.kwargs, out, slots)


def compute_constants(values: Iterable[Value], tensors: Mapping[str, Tensor]) -> dict[Value, Any]:
    """Returns the results of constants, given in order. tensors: the parameters and buffers that
    they need."""
    found: dict[Value, Any] = {}
    for value in values:
        if value.tensor:
            found[value] = tensors[value.tensor]
            continue
        slots: Slots = [*(found[each] for each in value.inputs), None]
        numbers = {each: slot for slot, each in enumerate((*value.inputs, value))}
        make_call(value, {}, numbers)(slots)
        found[value] = slots[-1]
    return found
