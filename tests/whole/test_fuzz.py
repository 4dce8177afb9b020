"""A short run of the fuzz targets, which `make fuzz` runs for long."""

from __future__ import annotations

import pytest
import uvloop

from tests.fuzz.__main__ import run_cases
from tests.fuzz.live import fuzz_server
from tests.fuzz.targets import TARGETS, Target
from tests.support.profile import THOROUGH

FEWER_CASES = {"tokenizer": 60, "ranks": 40, "tekken": 40}
"""Targets that ask a child process."""


@pytest.mark.property
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str) -> None:
    most = FEWER_CASES.get(name, 2_000)
    if not THOROUGH:
        most //= 4
    assert run_cases(name, TARGETS[name], seed=1, seconds=600, most=most).total() == most


def test_a_failing_target_is_found() -> None:
    """The target fails for one input in some thousands."""

    def fail(data: bytes) -> None:
        assert b"\\u" not in data

    with pytest.raises(AssertionError, match="AssertionError for b"):
        run_cases("x", Target(fail, (b'{"a": "b"}',)), seed=0, seconds=600, most=20_000)


def test_mutated_bodies_never_break_the_server() -> None:
    statuses = uvloop.run(fuzz_server(seconds=600, most=1_500, seed=2))
    assert statuses[200] > 20 and statuses[400] > 500, statuses
