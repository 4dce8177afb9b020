"""The wheel has the modules of bench that `serve bench` and `serve plan` reach, and no others."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tests.support.source_tree import ROOT, file_of, imports_of, sources, tree

COMMAND = Path("serve/cli/main.py")
"""The module that imports bench when one of the two commands is chosen."""
MODULE = re.compile(r"(bench(?:\.\w+)+)(?::\w+)?")


def excluded_patterns() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["scikit-build"]["wheel"]["exclude"]
    return [pattern for pattern in patterns if pattern.startswith("bench/")]


def named(path: Path) -> Iterator[Path]:
    """Yields the modules of bench that a file names in strings: what `python -m` runs in another
    process, and "module:function" that is imported when a command is chosen."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = MODULE.fullmatch(node.value)
            module = file_of(name[1]) if name else None
            if module is not None:
                yield module


def reached() -> set[Path]:
    """Returns the modules of bench that the commands reach, and the packages that hold them."""
    found: set[Path] = set()
    waiting = [COMMAND]
    while waiting:
        path = waiting.pop()
        used = {other for other in imports_of(path) if other.parts[0] == "bench"}
        new = (used | set(named(path))) - found
        found |= new
        waiting += new
    packages = {folder for path in found for folder in path.parents if folder != Path()}
    return found | {folder / "__init__.py" for folder in packages}


def test_the_wheel_has_what_the_commands_reach() -> None:
    patterns = excluded_patterns()
    kept = {
        path
        for path in sources("bench")
        if not any(fnmatchcase(str(path), pattern) for pattern in patterns)
    }
    needed = reached()
    assert sorted(needed - kept) == [], "excluded, but a command reaches them"
    assert sorted(kept - needed) == [], "in the wheel, but no command reaches them"


def test_every_pattern_excludes_a_file() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "bench").rglob("*")]
    for pattern in excluded_patterns():
        assert any(fnmatchcase(file, pattern) for file in files), pattern
