"""The project's Python files, their syntax trees, and which of our files each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("serve", "memory", "ops", "quant", "transport", "bench")


def sources(*folders: str) -> list[Path]:
    """Returns the Python files below these folders, relative to ROOT."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def imported(path: Path) -> Iterator[str]:
    """Yields the dotted names of all imports; `from package import module` gives both."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """Returns the file that a dotted name stands for, or None for a name inside a module or one
    that is not ours."""
    path = Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / candidate).is_file():
            return candidate
    return None


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """Returns our files that a file imports, also inside functions. A package stands for its
    __init__.py only where a name is taken from it that is no module."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            for alias in node.names:
                found.add(file_of(f"{module}.{alias.name}") or file_of(module))
    return frozenset(other for other in found if other is not None and other != path)
