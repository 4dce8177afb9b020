"""`make figures` makes the table from documents and writes it between its marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cli import figures

HEAD = {
    "commit": "abc1234",
    "began": "2026-11-22 20:00",
    "machine": "a machine",
    "processors": 2,
    "torch": "2.13",
}


def reading(shape: str, share: float, ceiling: str, limit: float) -> dict[str, object]:
    return {
        "name": "int8 linear",
        "shape": shape,
        "share": share,
        "ceiling": ceiling,
        "limit": limit,
    }


def test_the_table_takes_its_place() -> None:
    row = next(row for row in figures.ROWS if row.command == "bench ops")
    found = {
        "head": HEAD,
        "readings": [
            reading("M=1 K=2048", 0.93, "read", 50.0),
            reading("M=512 K=2048", 0.85, "i8", 2000.0),
        ],
    }
    page = f"before\n{figures.BEGIN}old\n{figures.END}after\n"
    made = figures.with_table(page, figures.table([(row, found)]))
    assert "M=1 93% of read, M=512 85% of i8" in made
    assert "Commit abc1234, 2026-11-22, a machine, 2 processors" in made
    assert "50 to 50 GB/s read, 2 to 2 TOP/s int8" in made
    assert made.startswith("before\n") and made.endswith("after\n") and "old" not in made


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="figures"):
        figures.with_table("nothing", "table")


def test_the_readme_has_the_marks() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text()
    assert figures.with_table(page, "x") != page


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", figures.ROWS, ids=lambda row: row.command.split(" --")[0])
def test_every_row_has_a_figure(row: figures.Row, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert row.figure(figures.run(row, tmp_path, quick=True))
