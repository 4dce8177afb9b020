"""Every row of the catalogue of bad inputs has a test, marked as in @pytest.mark.row("F1")."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Bad inputs by kind: HTTP framing, connections, JSON, parameters, prompts and templates,
# structured output, authentication and routing, memory nodes, files.
NUM_ROWS = {"F": 30, "C": 15, "J": 21, "P": 29, "T": 17, "G": 11, "A": 16, "M": 13, "X": 10}
ROWS = {f"{kind}{number}" for kind, count in NUM_ROWS.items() for number in range(1, count + 1)}


def _marked(tree: ast.AST) -> Iterator[str]:
    """Yields the rows that pytest.mark.row(...) names in a decorator or in a parameter's marks."""
    for node in ast.walk(tree):
        is_mark = isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row"
        if is_mark:
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def test_every_row_has_a_test() -> None:
    marked: set[str] = set()
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        marked.update(_marked(ast.parse(file.read_text())))
    assert len(ROWS) == 162
    assert marked - ROWS == set(), "rows that do not exist"
    assert ROWS - marked == set(), "rows without a test"
