"""`make figures` makes the table from documents and writes it between its marks."""

from __future__ import annotations

import subprocess
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

QUICK = {
    "bench latency": "bench latency random:tiny --quick",
    "bench throughput": "bench throughput --quick --peer transformers",
    "eval": "eval --max-tokens 512",
    "bench http random:llama-1b": "bench http random:tiny --quick",
}
"""The commands of a dry run by the beginning of a row's command; other rows run with --quick."""


def quick_command(row: figures.Row) -> str:
    commands = [quick for start, quick in QUICK.items() if row.command.startswith(start)]
    (command,) = commands or [f"{row.command} --quick"]
    return f"serve {command}"


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


def test_a_report_stands_between_the_marks_of_its_command() -> None:
    page = "a\n<!-- report: serve bench ops -->\nold\n<!-- end of report -->\nb\n"
    assert figures.commands_of(page) == ["serve bench ops"]
    result = figures.Result('head  \n 1 GB/s\n{"json": 1}\n', None, "61 s, abc")
    assert figures.with_reports(page, {"serve bench ops": result}) == (
        "a\n<!-- report: serve bench ops -->\n```text\n$ serve bench ops   # 61 s, abc\nhead\n"
        " 1 GB/s\n```\n<!-- end of report -->\nb\n"
    )


def test_the_docs_name_commands_that_can_run() -> None:
    pages = (Path(__file__).parents[3] / "docs").glob("*.md")
    commands = [command for page in pages for command in figures.commands_of(page.read_text())]
    assert commands
    assert all(command.startswith(("serve bench ", "python -m bench.")) for command in commands)


def test_a_measured_command_is_not_run_again(tmp_path: Path) -> None:
    command = "python -m bench.no_such_module"
    with pytest.raises(subprocess.CalledProcessError):
        figures.measure(command, tmp_path)
    (tmp_path / "python-m-bench-no_such_module.txt").write_text("2 s\nreport\n")
    assert figures.measure(command, tmp_path) == ("report\n", None, "2 s")


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", figures.ROWS, ids=lambda row: row.command.split(" --")[0])
def test_every_row_has_a_figure(row: figures.Row, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert row.figure(figures.measure(quick_command(row), tmp_path).document)
