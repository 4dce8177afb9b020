"""Makes the tables of formats in docs/tools.md.

`python tests/support/text/formats_table.py` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tools.md"
BEGIN, END = (
    "<!-- formats: tests/support/text/formats_table.py -->\n",
    "<!-- end of formats -->\n",
)


def table() -> str:
    from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS

    lines = [
        "| `--tool-parser` | A call | Models | Chosen when the template has |",
        "|---|---|---|---|",
    ]
    for row in sorted(TOOL_FORMATS.values(), key=lambda item: item.name):
        chosen = _marks(row.marks, row.needs, row.lacks)
        names = _names(row.name, row.aliases)
        lines.append(f"| {names} | {_code(row.example)} | {row.families} | {chosen} |")
    lines += ["| `none` | Requests with tools are refused | | |", ""]
    lines += [
        "| `--reasoning-parser` | Reasoning | Models | Chosen when the template has |",
        "|---|---|---|---|",
    ]
    for item in sorted(REASONING_FORMATS.values(), key=lambda item: item.name):
        chosen = _marks(item.marks, item.needs, item.lacks)
        text = f"{item.begin} ... {item.end}"
        if item.answer:
            text += f" {item.answer[0]} ... {item.answer[1]}"
        names = _names(item.name, item.aliases)
        lines.append(f"| {names} | {_code(text)} | {item.families} | {chosen} |")
    return "\n".join([*lines, "| `none` | All text is content | | |", ""])


def _names(name: str, aliases: tuple[str, ...]) -> str:
    return ", ".join(f"`{item}`" for item in (name, *aliases))


def _marks(marks: tuple[str, ...], needs: tuple[str, ...], lacks: tuple[str, ...]) -> str:
    text = " or ".join(map(_code, marks))
    text += "".join(f" and {_code(need)}" for need in needs)
    return text + (f", but not {' or '.join(map(_code, lacks))}" if lacks else "")


def _code(text: str) -> str:
    quote = "``" if "`" in text else "`"
    inner = text.replace("|", "\\|").replace("\n", "\\n")
    return f"{quote} {inner} {quote}" if quote == "``" else f"`{inner}`"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_table(PAGE.read_text()))
