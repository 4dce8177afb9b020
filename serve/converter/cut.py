"""The least that must be carried from one attention to the next, as a minimum cut.

This is Lamina's way to split a model at its attentions (arXiv 2405.01814): values are
vertices whose capacity is their bytes for one row, and the cut with the fewest bytes says which
values a slice hands to the next. Values that depend on positions alone are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from serve.converter.graph import ROWS, Graph, Value

_ENDLESS = 1 << 60
_Vertex = tuple[int, bool]  # a value's number, and whether it is its end
_SOURCE, _SINK = (-1, False), (-2, False)
_Node = TypeVar("_Node")


@dataclass(frozen=True, slots=True)
class Cut:
    """before: the values of rows that are computed before the cut. carried: those of them that are
    needed after it, in order."""

    before: frozenset[Value]
    carried: tuple[Value, ...]

    def row_size(self, ids: Value) -> int | None:
        """Returns the numbers of a row, without its token id, that one matrix of floats can carry.
        None if what is carried has another form."""
        sent = [value for value in self.carried if value is not ids]
        if not sent or len({value.dtype for value in sent}) > 1:
            return None
        total = 0
        for value in sent:
            shape, dtype = value.shape, value.dtype
            if dtype is None or not dtype.is_floating_point or shape is None:
                return None
            if shape[:2] != (1, -1) or min(shape[2:], default=0) < 1:
                return None
            total += prod(shape[2:])
        return total


def find_cuts(graph: Graph) -> list[Cut]:
    """Returns a cut before each attention, and one after the hidden state. The first one carries
    the token ids."""
    rows = [value for value in graph.values if value.kind == ROWS]
    inner = _inner(graph, rows)
    attentions = graph.attentions
    users: dict[Value, list[Value]] = {value: [] for value in inner}
    for value in inner:
        for each in value.inputs:
            if each in users:
                users[each].append(value)
    cuts = [Cut(frozenset([graph.ids]), (graph.ids,))]
    for index in range(1, len(attentions)):
        before = _closure(attentions[:index], {v: _row_inputs(v) for v in inner}) | {graph.ids}
        after = _closure([*attentions[index:], graph.hidden], users)
        cuts.append(_Flow(inner, users, before, after).cut())
    cuts.append(Cut(frozenset(inner), (graph.hidden,)))
    return cuts


def _inner(graph: Graph, rows: list[Value]) -> list[Value]:
    """Returns the values of rows that the hidden state needs, in order."""
    needed = _closure([graph.hidden], {value: _row_inputs(value) for value in rows})
    return [value for value in rows if value in needed or value is graph.ids]


def _row_inputs(value: Value) -> list[Value]:
    return [each for each in value.inputs if each.kind == ROWS]


def _closure(starts: Sequence[_Node], edges: Mapping[_Node, Sequence[_Node]]) -> set[_Node]:
    found, open_ = set(starts), list(starts)
    while open_:
        new = [each for each in edges[open_.pop()] if each not in found]
        found.update(new)
        open_.extend(new)
    return found


class _Flow:
    """The largest flow of bytes from what is before a cut to what is after it."""

    def __init__(
        self,
        values: list[Value],
        users: dict[Value, list[Value]],
        before: set[Value],
        after: set[Value],
    ) -> None:
        self._values, self._users = values, users
        self._before, self._after = before, after
        self._left: dict[_Vertex, dict[_Vertex, int]] = {}
        for value in values:
            if value in after:
                continue
            begin, end = (value.number, False), (value.number, True)
            if value in before:
                if all(user in before for user in users[value]):
                    continue
                self._add(_SOURCE, begin, _ENDLESS)
            self._add(begin, end, _ENDLESS if value.row_bytes is None else value.row_bytes)
            for user in users[value]:
                if user in after:
                    self._add(end, _SINK, _ENDLESS)
                elif user not in before:
                    self._add(end, (user.number, False), _ENDLESS)
                    # what is computed before the cut needs its inputs there
                    self._add((user.number, False), begin, _ENDLESS)

    def _add(self, start: _Vertex, end: _Vertex, capacity: int) -> None:
        forward = self._left.setdefault(start, {})
        forward[end] = forward.get(end, 0) + capacity
        self._left.setdefault(end, {}).setdefault(start, 0)

    def cut(self) -> Cut:
        while (path := self._path()) is not None:
            amount = min(self._left[a][b] for a, b in path)
            for a, b in path:
                self._left[a][b] -= amount
                self._left[b][a] += amount
        late = self._reaching_sink()
        computed = [
            value
            for value in self._values
            if value in self._before
            or (value not in self._after and (value.number, False) not in late)
        ]
        early = frozenset(computed)
        carried = [v for v in computed if any(user not in early for user in self._users[v])]
        return Cut(early, tuple(carried))

    def _path(self) -> list[tuple[_Vertex, _Vertex]] | None:
        """Returns the edges of a way from source to sink that has capacity left."""
        reached = self._reached()
        if _SINK not in reached:
            return None
        path, vertex = [], _SINK
        while vertex != _SOURCE:
            path.append((reached[vertex], vertex))
            vertex = reached[vertex]
        return path

    def _reaching_sink(self) -> set[_Vertex]:
        """Returns what still reaches the sink. All else may be computed before the cut: of equal
        cuts this is the last, so that a stage ends with the MLP of its last layer."""
        starts: dict[_Vertex, list[_Vertex]] = {}
        for start, ends in self._left.items():
            for end, left in ends.items():
                if left > 0:
                    starts.setdefault(end, []).append(start)
        return _closure([_SINK], {vertex: starts.get(vertex, []) for vertex in self._left})

    def _reached(self) -> dict[_Vertex, _Vertex]:
        """Returns what the source still reaches, each with the vertex before it."""
        found, open_ = {_SOURCE: _SOURCE}, [_SOURCE]
        for vertex in open_:
            for end, left in self._left.get(vertex, {}).items():
                if left > 0 and end not in found:
                    found[end] = vertex
                    open_.append(end)
        return found
