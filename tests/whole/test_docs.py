"""Files and `python -m` modules that the docs and the folders' docstrings name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PATH = re.compile(
    r"\b(?:serve|memory|ops|quant|transport|bench|tests|examples|deploy)/[\w/]+\.\w+\b"
)
# A file name in a folder's docstring; `*_writer.py` names several files.
FILE = re.compile(r"(?<![\w/.*-])[\w/]+\.(?:py|md|h|cpp)\b")
FOLDERS = sorted(
    path.parent.relative_to(ROOT)
    for package in ("serve", "memory", "ops", "quant", "transport", "bench")
    for path in (ROOT / package).rglob("__init__.py")
)
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


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_files_that_a_folder_names_exist(folder: Path) -> None:
    """The docstring of `__init__.py` names files of its folder, or by their path from the root."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    places = (ROOT / folder, ROOT)
    named = FILE.findall(text)
    assert [name for name in named if not any((place / name).is_file() for place in places)] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()
