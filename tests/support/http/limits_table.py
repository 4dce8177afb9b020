"""The tables of limits in docs/operations.md: `python tests/support/http/limits_table.py`
writes them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- limits: tests/support/http/limits_table.py -->\n", "<!-- end of limits -->\n"


def with_table(page: str) -> str:
    from tests.support.http.limit_table import markdown

    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + markdown() + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_table(PAGE.read_text()))
