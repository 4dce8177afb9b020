"""Descriptions that `python -m bench... --help` prints."""

from __future__ import annotations

import ast
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"


def test_columns_and_lists_keep_their_lines() -> None:
    """By default argparse joins the lines of a description."""
    joined, num_described = [], 0
    for path in sorted(BENCH.rglob("*.py")):
        source = path.read_text()
        if "description=__doc__)" not in source and "description=__doc__," not in source:
            continue
        num_described += 1
        lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
        has_columns = any(line.startswith((" ", "- ")) for line in lines)
        if has_columns and "RawDescriptionHelpFormatter" not in source:
            joined.append(str(path))
    assert num_described and not joined
