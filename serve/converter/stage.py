"""A range of a converted model's layers as a generator of slices, with what goes in and out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from memory.attention.seam import Attention
from serve.converter.cut import Cut
from serve.converter.graph import CONSTANT, POSITIONS, ROWS, Graph, Value, ancestors
from serve.converter.interface import unsupported
from serve.converter.program import Call, Slots, make_call

StageSlices = Generator[None, None, list[Tensor]]
"""A pass of a stage that yields before each wait for attention and returns what is carried on."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor between two stages. shape: -1 stands for the number of rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Weights:
    """What a graph computes with. constants: results of values that depend on weights alone.
    functions: of products and lookups."""

    constants: Mapping[Value, Any]
    functions: Mapping[Value, Callable[..., Any]]


@dataclass(slots=True)
class _Slice:
    """The calls around one attention: up to q, then up to k and v, then what needs no attention.

    layer: its number. frees: slots that are free when it has k and v. copies_k: k has other uses.
    """

    layer: int
    q: int
    k: int
    v: int
    out: int
    num_values: int  # of a head's values, which may be fewer than those of its keys
    up_to_q: list[Call]
    up_to_kv: list[Call]
    beside: list[Call]
    copies_k: bool
    frees: tuple[int, ...] = ()


class Stage:
    """The layers between two cuts. Layers have the numbers that they have in the model."""

    def __init__(
        self, graph: Graph, cuts: Sequence[Cut], weights: Weights, first: int, count: int
    ) -> None:
        """first, count: the attentions that the stage computes."""
        begin, end = cuts[first], cuts[first + count]
        self.inputs = [_carried(value) for value in begin.carried]
        self.outputs = [_carried(value) for value in end.carried]
        own = end.before - begin.before
        needed = [v for v in ancestors(list(end.carried)) if v in own]
        fixed = [v for v in _fixed(needed) if v not in (graph.positions, graph.num_rows)]
        self._number = {
            value: slot
            for slot, value in enumerate(
                [graph.positions, graph.num_rows, *begin.carried, *fixed, *needed]
            )
        }
        constants = dict.fromkeys(
            x
            for value in (*fixed, *needed)
            for x in value.inputs
            if x.kind == CONSTANT and x in weights.constants
        )
        for value in constants:
            self._number.setdefault(value, len(self._number))
        self._empty: Slots = [weights.constants.get(value) for value in self._number]
        self._functions = weights.functions
        self._prologue = self._calls(fixed)
        self._slices, left = self._cut_into_slices(graph, needed)
        self._epilogue = self._calls(left)
        self._out = [self._number[value] for value in end.carried]
        self._free_early({graph.num_rows, graph.positions, *constants, *end.carried})

    def slices(
        self, carried: Sequence[Tensor], positions: Tensor, attention: Attention
    ) -> StageSlices:
        """Computes the layers for rows with the given positions, [T].

        carried: as in `inputs`. Yields before each wait for attention, and returns the tensors of
        `outputs`. Closing the generator abandons the pass.
        """
        slots = self._empty.copy()
        slots[0], slots[1] = positions.unsqueeze(0), len(positions)
        slots[2 : 2 + len(carried)] = carried
        _run(self._prologue, slots)
        for part in self._slices:
            _run(part.up_to_q, slots)
            q = _by_row(slots[part.q])
            ticket = attention.begin(part.layer, q)
            _run(part.up_to_kv, slots)
            k, v = _by_row(slots[part.k]), _by_row(slots[part.v])
            if part.copies_k:
                k = k.clone()  # attention may overwrite it
            if part.num_values < k.shape[-1]:
                v = functional.pad(v, (0, k.shape[-1] - part.num_values))
            pending = attention.finish(ticket, k, v, None)
            for slot in part.frees:
                slots[slot] = None
            _run(part.beside, slots)
            del q, k, v, ticket
            yield
            slots[part.out] = pending.wait()[None, ..., : part.num_values]
        _run(self._epilogue, slots)
        return [slots[slot] for slot in self._out]

    def _calls(self, values: Sequence[Value]) -> list[Call]:
        return [make_call(value, self._functions, self._number) for value in values]

    def _cut_into_slices(
        self, graph: Graph, needed: Sequence[Value]
    ) -> tuple[list[_Slice], list[Value]]:
        """Orders the values around the attentions. Returns those after the last one, too."""
        numbers = {value: number for number, value in enumerate(graph.attentions)}
        left, found = list(needed), []
        for attention in [value for value in needed if value.is_attention]:
            q, k, v = attention.args[:3]
            up_to_q, left = _split(left, set(ancestors([q])))
            up_to_kv, left = _split(left, set(ancestors([k, v])))
            late = _users_of(attention, left)
            beside, left = _split(left, set(left) - late)
            left.remove(attention)
            found.append(
                _Slice(
                    layer=numbers[attention],
                    q=self._number[q],
                    k=self._number[k],
                    v=self._number[v],
                    out=self._number[attention],
                    num_values=v.shape[-1],
                    up_to_q=self._calls(up_to_q),
                    up_to_kv=self._calls(up_to_kv),
                    beside=self._calls(beside),
                    copies_k=sum(k in value.inputs for value in needed) > 1,
                )
            )
        return found, left

    def _free_early(self, kept: set[Value]) -> None:
        """Notes after which call each slot is free, but for those that are kept."""
        last: dict[int, Call | _Slice] = {}
        order: list[Call | _Slice] = [*self._prologue]
        for part in self._slices:
            order += [*part.up_to_q, *part.up_to_kv, part, *part.beside]
        order += self._epilogue
        for each in order:
            used = (each.q, each.k, each.v) if isinstance(each, _Slice) else each.uses()
            last.update(dict.fromkeys(used, each))
        kept_slots = {self._number[value] for value in kept}
        for slot, each in last.items():
            if slot not in kept_slots:
                each.frees = (*each.frees, slot)


def _run(calls: Sequence[Call], slots: Slots) -> None:
    for call in calls:
        call(slots)


def _by_row(heads: Tensor) -> Tensor:
    """Returns [T, H, D] for [1, H, T, D]."""
    return heads[0].transpose(0, 1).contiguous()


def _carried(value: Value) -> Carried:
    assert value.shape is not None and value.dtype is not None, f"{value.name} is no tensor"
    return Carried(value.name, value.shape, value.dtype)


def _fixed(values: Sequence[Value]) -> list[Value]:
    """Returns what values of rows need of those that depend on positions alone, in order."""
    direct = {x for value in values for x in value.inputs if x.kind == POSITIONS}
    return [value for value in ancestors(list(direct)) if value.kind == POSITIONS]


def _split(values: Sequence[Value], chosen: set[Value]) -> tuple[list[Value], list[Value]]:
    return [v for v in values if v in chosen], [v for v in values if v not in chosen]


def _users_of(attention: Value, values: Sequence[Value]) -> set[Value]:
    """Returns an attention, and those values after it that depend on it or on a later one."""
    found = {attention}
    for value in values:
        if value.is_attention or any(each in found for each in value.inputs):
            found.add(value)
    return found


def hidden_to_logits(graph: Graph, weights: Weights) -> Callable[[Tensor], Tensor]:
    """Returns the function of the hidden state, [1, T, hidden], that computes the logits.
    ModelLoadError if they depend on positions, too."""
    before = set(ancestors([graph.hidden]))
    values = [v for v in ancestors([graph.logits]) if v.kind == ROWS and v not in before]
    fixed = [v for v in _fixed(values) if v is not graph.num_rows]
    if graph.positions in fixed:
        raise unsupported("logits that depend on positions")
    number = {v: i for i, v in enumerate([graph.hidden, graph.num_rows, *fixed, *values])}
    constants = []
    for value in (*fixed, *values):
        for each in value.inputs:
            if each in weights.constants and each not in number:
                number[each] = len(number)
                constants.append((number[each], weights.constants[each]))
    calls = [make_call(value, weights.functions, number) for value in (*fixed, *values)]

    def logits(hidden: Tensor) -> Tensor:
        slots: Slots = [None] * len(number)
        slots[0], slots[1] = hidden, hidden.shape[1]
        for slot, constant in constants:
            slots[slot] = constant
        _run(calls, slots)
        result: Tensor = slots[number[graph.logits]]
        return result

    return logits
