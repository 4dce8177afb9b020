"""The cases of a product of parameters that run every day have what `covering` promises."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.profile import covering_places, mark_the_rest

LEVELS = (3, 4, 2, 5)


def _array(strength: int) -> tuple[list[set[Any]], set[int]]:
    cases = [set(combinations(enumerate(each), strength)) for each in product(*map(range, LEVELS))]
    return cases, covering_places(cases)


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 26)])
def test_few_cases_have_every_value_or_pair(strength: int, most: int) -> None:
    cases, chosen = _array(strength)
    assert 0 in chosen
    assert set().union(*(cases[place] for place in chosen)) == set().union(*cases)
    assert len(chosen) <= most  # of 120


class Case:
    """A case of a test with the mark covering(strength)."""

    def __init__(self, params: dict[str, Any], strength: int, *more: Any) -> None:
        self.nodeid = f"file::test[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = [pytest.mark.covering(strength).mark, *(each.mark for each in more)]

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark)


def test_cases_with_a_mark_of_their_own_stand_for_no_value() -> None:
    cases = [
        Case({"one": one, "two": two}, 1, *([pytest.mark.exhaustive] if two == 2 else []))
        for one, two in product("abc", (2, 1, 3, 4))
    ]
    mark_the_rest(cases)  # type: ignore[arg-type]
    every_day = [
        case.callspec.params for case in cases if not case.get_closest_marker("exhaustive")
    ]
    assert len(every_day) == 3
    assert {each["one"] for each in every_day} == set("abc")
    assert {each["two"] for each in every_day} == {1, 3, 4}


@pytest.mark.parametrize(("strength", "params"), [(3, {"a": 1, "b": 2}), (2, {"a": 1})])
def test_what_asks_for_more_than_there_is_is_told(strength: int, params: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"covering\(1\) or|too few parameters"):
        mark_the_rest([Case(params, strength)])  # type: ignore[list-item]
