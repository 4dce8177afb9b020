"""Files and `python -m` modules that the docs name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PATH = re.compile(r"\b(?:serve|memory|ops|quant|transport|bench|tests|examples)/[\w/]+\.\w+\b")
MODULE = re.compile(r"python -m ((?:serve|bench|tests|examples)[\w.]*\w)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    named = {path for path in PATH.findall(text) if not path.startswith("bench/results/")}
    missing = {path for path in named if not (ROOT / path).exists()}
    for module in MODULE.findall(text):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
            missing.add(module)
    assert not missing


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()
