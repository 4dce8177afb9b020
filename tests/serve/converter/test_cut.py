"""Minimum cuts between attentions: against all possible cuts of small random graphs."""

from __future__ import annotations

import itertools
import random

import pytest

from serve.converter import interface
from serve.converter.cut import find_cuts
from serve.converter.graph import POSITIONS, ROWS, Graph, Value, ancestors


class _Graph:
    """Builds a graph value by value."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.num_rows = self.add("num_rows", 0, POSITIONS)
        self.positions = self.add("positions", 8, POSITIONS)
        self.ids = self.add("ids", 8)

    def add(self, name: str, row_bytes: int, kind: str = ROWS, *inputs: Value) -> Value:
        value = Value(len(self.values), name, kind, target=max, inputs=inputs, row_bytes=row_bytes)
        self.values.append(value)
        return value

    def rows(self, name: str, row_bytes: int, *inputs: Value) -> Value:
        return self.add(name, row_bytes, ROWS, *inputs)

    def attention(self, name: str, *inputs: Value) -> Value:
        value = self.rows(name, 8, *inputs)
        value.target = interface.OPERATOR
        return value

    def graph(self, hidden: Value) -> Graph:
        needed = list(ancestors([hidden]))
        return Graph(needed, self.ids, self.positions, self.num_rows, hidden, hidden)


def names(cut) -> list[str]:
    return [value.name for value in cut.carried]


def test_a_llama_carries_its_hidden_state() -> None:
    made = _Graph()
    x = made.rows("x0", 64, made.ids)
    rotation = made.add("rotation", 512, POSITIONS, made.positions)
    for layer in range(3):
        norm = made.rows(f"norm{layer}", 64, x)
        q, k, v = (made.rows(f"{n}{layer}", 32, norm, rotation) for n in "qkv")
        out = made.attention(f"attention{layer}", q, k, v)
        middle = made.rows(f"middle{layer}", 64, x, out)
        x = made.rows(f"x{layer + 1}", 64, middle, made.rows(f"mlp{layer}", 256, middle))
    cuts = find_cuts(made.graph(x))
    assert [names(cut) for cut in cuts] == [["ids"], ["x1"], ["x2"], ["x3"]]
    assert all(one.before < two.before for one, two in itertools.pairwise(cuts))


def test_a_narrow_value_is_carried_in_place_of_what_it_widens_to() -> None:
    made = _Graph()
    first = made.attention("a0", made.rows("q0", 8, made.ids))
    narrow = made.rows("narrow", 4, first)
    wide = made.rows("wide", 400, narrow)
    second = made.attention("a1", made.rows("q1", 8, wide), made.rows("k1", 8, wide))
    cuts = find_cuts(made.graph(made.rows("hidden", 8, second)))
    assert names(cuts[1]) == ["narrow"]


def test_token_ids_are_carried_rather_than_what_is_looked_up_by_them() -> None:
    made = _Graph()
    table = made.rows("table", 100, made.ids)
    first = made.attention("a0", made.rows("x", 100, made.ids))
    second = made.attention("a1", made.rows("q1", 64, first, table))
    hidden = made.rows("hidden", 64, second, table)
    assert names(find_cuts(made.graph(hidden))[1]) == ["ids", "a0"]


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_of_a_random_graph_has_fewer_bytes(seed) -> None:
    rng = random.Random(seed)
    made = _Graph()
    open_ = [made.ids, made.rows("x", rng.randint(1, 9), made.ids)]
    for number in range(2):
        for _ in range(rng.randint(1, 4)):
            inputs = rng.sample(open_, min(len(open_), rng.randint(1, 2)))
            open_.append(made.rows(f"v{len(made.values)}", rng.randint(1, 9), *inputs))
        open_.append(made.attention(f"a{number}", *rng.sample(open_, 2)))
        open_[-1].row_bytes = rng.randint(1, 9)
    attentions = [value for value in made.values if value.is_attention]
    graph = made.graph(made.rows("hidden", 5, *attentions, *rng.sample(open_, 2)))
    cut = find_cuts(graph)[1]
    assert sum(v.row_bytes or 0 for v in cut.carried) == _fewest_bytes(graph)
    _check(graph, cut)


def _check(graph: Graph, cut) -> None:
    """The cut lies between the attentions, and nothing before it needs anything after it."""
    first, second = graph.attentions
    assert first in cut.before
    assert second not in cut.before
    for value in cut.before:
        assert all(x in cut.before for x in value.inputs if x.kind == ROWS)
    used = {x for v in graph.values if v not in cut.before for x in v.inputs if x.kind == ROWS}
    assert {x for x in used if x in cut.before} <= set(cut.carried)


def _fewest_bytes(graph: Graph) -> int:
    """Tries every set of values that could be computed before the second attention."""
    rows = [v for v in graph.values if v.kind == ROWS]
    first, second = graph.attentions
    found = []
    for chosen in itertools.product((False, True), repeat=len(rows)):
        before = {v for v, is_in in zip(rows, chosen, strict=True) if is_in}
        if not {first, graph.ids} <= before or {second, graph.hidden} & before:
            continue
        if any(x not in before for v in before for x in v.inputs if x.kind == ROWS):
            continue
        later = [v for v in rows if v not in before]
        carried = {x for v in later for x in v.inputs if x in before}
        found.append(sum(v.row_bytes or 0 for v in carried))
    return min(found)
