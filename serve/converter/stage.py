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
from serve.models.shard import WHOLE, Shard

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
    functions: of products and lookups. shard: the part of them that this rank has."""

    constants: Mapping[Value, Any]
    functions: Mapping[Value, Callable[..., Any]]
    shard: Shard = WHOLE


@dataclass(slots=True)
class _Slice:
    """The calls around one attention: up to q, then up to k and v, then what needs no attention.

    layer: its number. heads: gathers the results of all ranks' heads, of which this rank has some.
    frees: slots that are free when it has k and v. copies_k: k has other uses.
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
    heads: Heads | None
    frees: tuple[int, ...] = ()


class Heads:
    """Some heads of an attention, whose results all tensor ranks share."""

    def __init__(self, shard: Shard, num_heads: int, num_kv_heads: int, size: int) -> None:
        """size: of a head's values."""
        self._columns = shard.columns(num_heads * size, num_heads // shard.size * size)
        self.q, self.kv = (_own(shard, count) for count in (num_heads, num_kv_heads))
        self._shape = num_heads, size

    def gather(self, own: Tensor) -> Tensor:
        """Returns [T, heads, size] for this rank's heads. All ranks call it."""
        # a copy: the buffer is written again before a graph may be done with the result
        whole = self._columns.gather(own.reshape(len(own), -1)).clone()
        return whole.view(len(own), *self._shape)


class Stage:
    """The layers between two cuts."""

    def __init__(
        self,
        graph: Graph,
        cuts: Sequence[Cut],
        weights: Weights,
        first: int,
        count: int,
        *,
        numbered_from: int = 0,
    ) -> None:
        """first, count: the attentions that the stage computes. numbered_from: the one that counts
        as layer 0 in calls of attention."""
        self._numbered_from = numbered_from
        begin, end = cuts[first], cuts[first + count]
        self.inputs = [_carried(value) for value in begin.carried]
        self.outputs = [_carried(value) for value in end.carried]
        needed, fixed = stage_values(graph, cuts, first, count)
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
        self._functions, self._shard = weights.functions, weights.shard
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
            q = _by_row(slots[part.q], None if part.heads is None else part.heads.q)
            ticket = attention.begin(part.layer, q)
            _run(part.up_to_kv, slots)
            own = None if part.heads is None else part.heads.kv
            k, v = _by_row(slots[part.k], own), _by_row(slots[part.v], own)
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
            out = pending.wait()[..., : part.num_values]
            slots[part.out] = (out if part.heads is None else part.heads.gather(out))[None]
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
                    layer=numbers[attention] - self._numbered_from,
                    q=self._number[q],
                    k=self._number[k],
                    v=self._number[v],
                    out=self._number[attention],
                    num_values=v.shape[-1],
                    up_to_q=self._calls(up_to_q),
                    up_to_kv=self._calls(up_to_kv),
                    beside=self._calls(beside),
                    copies_k=sum(k in value.inputs for value in needed) > 1,
                    heads=self._heads(q, v),
                )
            )
        return found, left

    def _heads(self, q: Value, v: Value) -> Heads | None:
        if self._shard.size == 1:
            return None
        assert q.shape is not None and v.shape is not None
        return Heads(self._shard, q.shape[1], v.shape[1], v.shape[3])

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


def _own(shard: Shard, num_heads: int) -> slice:
    count = num_heads // shard.size
    return slice(shard.rank * count, (shard.rank + 1) * count)


def _run(calls: Sequence[Call], slots: Slots) -> None:
    for call in calls:
        call(slots)


def _by_row(heads: Tensor, own: slice | None) -> Tensor:
    """Returns [T, H, D] for [1, H, T, D]. own: only these heads."""
    chosen = heads[0] if own is None else heads[0, own]
    return chosen.transpose(0, 1).contiguous()


def _carried(value: Value) -> Carried:
    assert value.shape is not None and value.dtype is not None, f"{value.name} is no tensor"
    return Carried(value.name, value.shape, value.dtype)


def stage_values(
    graph: Graph, cuts: Sequence[Cut], first: int, count: int
) -> tuple[list[Value], list[Value]]:
    """Returns the values of rows that a range of attentions computes, and those of positions that
    it computes for them, each in order."""
    begin, end = cuts[first], cuts[first + count]
    own = end.before - begin.before
    needed = [v for v in ancestors(list(end.carried)) if v in own]
    fixed = [v for v in _fixed(needed) if v not in (graph.positions, graph.num_rows)]
    return needed, fixed


def head_values(graph: Graph) -> tuple[list[Value], list[Value]]:
    """Returns the values of rows behind the hidden state, and those of positions that they need,
    each in order."""
    before = set(ancestors([graph.hidden]))
    values = [v for v in ancestors([graph.logits]) if v.kind == ROWS and v not in before]
    return values, [v for v in _fixed(values) if v is not graph.num_rows]


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
    values, fixed = head_values(graph)
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
