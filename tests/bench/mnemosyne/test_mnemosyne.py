"""The table of Mnemosyne: rows that must match do, and the one constant is the fitted one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.mnemosyne.__main__ import report
from bench.mnemosyne.paper import (
    PUBLISHED,
    SMALL,
    chunk_ratio,
    error_of,
    figure_17,
    fit_exchange_s,
    fit_fixed_s,
    grid_cost,
)
from bench.mnemosyne.rows import AT_ODDS, BOUND_ONLY, INPUT, MUST_MATCH, Row, all_rows
from bench.mnemosyne.scheduled import alone, beside_streams
from bench.plan.grid import EXCHANGE_S
from bench.plan.pipeline import fixed_chunks, prefill


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return all_rows()


def test_every_row_is_as_its_kind_says(rows: list[Row]) -> None:
    assert [row for row in rows if not row.is_met] == []
    kinds = [row.kind for row in rows]
    assert {kind: kinds.count(kind) for kind in (MUST_MATCH, BOUND_ONLY, AT_ODDS, INPUT)} == {
        MUST_MATCH: 12,
        BOUND_ONLY: 5,
        AT_ODDS: 1,
        INPUT: 2,
    }


def test_what_is_at_odds_says_why(rows: list[Row]) -> None:
    (row,) = [row for row in rows if row.kind == AT_ODDS]
    assert row.what.startswith("70B") and row.verdict == "at odds"
    assert "29.6 ms at 100 %" in row.why and "33" in row.predicted


def test_a_missed_row_is_seen(rows: list[Row]) -> None:
    missed = rows[0]._replace(is_met=False)
    assert missed.verdict == "must match: NOT MET" and rows[0].verdict == "must match: met"


def test_the_constant_is_the_fitted_one() -> None:
    fitted = fit_exchange_s()
    assert pytest.approx(fitted, rel=0.01) == EXCHANGE_S
    around = [error_of(figure_17(factor * fitted)) for factor in (0.9, 1.0, 1.1)]
    assert around[1] == min(around) and error_of(PUBLISHED) == 0.0


def test_a_fixed_time_of_a_step_does_not_explain_both() -> None:
    """It fits decode as well, but 31,250 steps of a prompt would take minutes longer."""
    fixed_s = fit_fixed_s()
    assert 8e-3 < fixed_s < 11e-3
    assert chunk_ratio(fixed_s) > 3 * chunk_ratio()


def test_the_report_has_every_row(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    report(rows, Console(width=150))
    said = capsys.readouterr().out
    assert said.count("must match: met") == 12 and said.count("bound only: met") == 5
    assert all(f"{number:2}. {row.why[:30]}" in said for number, row in enumerate(rows, start=1))
    assert "The constant: 201 µs a layer" in said


def test_the_scheduler_is_as_fast_as_the_recurrence() -> None:
    """It launches a chunk when the oldest step has ended, so it waits for the hops, too."""
    for spp in (1, 4, 16):
        cost = grid_cost(SMALL, spp)
        exact = prefill(cost, 200_000, fixed_chunks(2048)).seconds
        scheduled = alone(SMALL, spp, 200_000, 2048)
        assert exact - 1e-9 <= scheduled <= 1.05 * exact


def test_streams_keep_their_time_beside_a_long_prompt() -> None:
    """With 4 stages, too: chunks are adapted to a pass, and cost the prompt little."""
    beside = beside_streams(SMALL, 4, 500_000, 30e-3)
    assert beside.p95_s <= 30e-3 and beside.short_s <= 62e-3
    assert beside.long_s <= 1.1 * alone(SMALL, 4, 500_000, 4096)


@pytest.mark.process
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.mnemosyne", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(file.read_text())) == 20
