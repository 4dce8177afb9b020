"""Imports point down: a table of which folder may import which, and no circles.

A folder may import those that its row lists, and itself. Imports under TYPE_CHECKING and inside
functions count. A folder without a row of its own belongs to the nearest one above it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.layers import LOWER, SUBTREES, TABLE
from tests.support.source_tree import PACKAGES, ROOT, circles, imported, imports_of, sources, tree

COMMANDS = {Path("serve/cli/main.py"), Path("serve/cli/model_files.py")}
"""They may import bench, inside functions: for `serve bench`, `serve plan` and random:llama-1b."""
ENTRIES = {Path("serve/__init__.py"), Path("serve/__main__.py")}
"""They hand names on, from anywhere in serve."""

PURE = ("serve/scheduler", "memory", "memory/prefix", "memory/pages")
"""Folders whose own files know no torch, asyncio, numpy or aiohttp."""
NOT_PURE = ("serve/scheduler/prompt_outputs.py", "memory/pages/cuda_")

ASYNCIO = (
    "serve/engine/engine.py",
    "serve/engine/request_stream.py",
    "serve/http/",
    "serve/cluster/",
    "serve/cli/main.py",
    "serve/cli/chat.py",
)
FORBIDDEN_EVERYWHERE = {"pickle", "dill", "marshal", "shelve"}


def row_of(path: Path) -> str:
    """The table's row for a file."""
    folder = path.parent
    while str(folder) not in TABLE:
        folder = folder.parent
    return str(folder)


def covers(permission: str, row: str) -> bool:
    """Returns whether a permission of the table allows imports from the folder of `row`."""
    if permission in ("*", row):
        return True
    return permission in SUBTREES and row.startswith(f"{permission}/")


def is_allowed(row: str, other: str) -> bool:
    return row == other or any(covers(permission, other) for permission in TABLE[row])


def may_import(path: Path, other: Path) -> bool:
    package, top = path.parts[0], other.parts[0]
    if top != package:
        return top in LOWER[package] or (top == "bench" and path in COMMANDS)
    return path in ENTRIES or is_allowed(row_of(path), row_of(other))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    imports = [(path, other) for path in sources(package) for other in imports_of(path)]
    wrong = [f"{path} imports {other}" for path, other in imports if not may_import(path, other)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("serve/scheduler/scheduler.py", "serve/engine/core.py"),
        ("serve/request.py", "serve/scheduler/sequence.py"),
        ("serve/http/edge/keys.py", "serve/http/openai/requests.py"),
        ("memory/pages/allocator.py", "memory/kv_manager.py"),
        ("memory/kv_manager.py", "serve/request.py"),
        ("bench/load/client/sender.py", "bench/load/report/html.py"),
    ],
)
def test_an_upward_import_is_found(lower: str, upper: str) -> None:
    assert (ROOT / lower).is_file() and (ROOT / upper).is_file()
    assert not may_import(Path(lower), Path(upper))


def test_a_downward_import_is_allowed() -> None:
    assert may_import(Path("serve/engine/core.py"), Path("serve/scheduler/scheduler.py"))
    assert may_import(Path("memory/kv_manager.py"), Path("memory/pages/allocator.py"))
    assert may_import(Path("serve/request.py"), Path("quant/kv.py"))


def test_every_permission_is_used() -> None:
    paths = [path for path in sources(*PACKAGES) if path not in ENTRIES]
    imports = [(path, other) for path in paths for other in imports_of(path)]
    rows = {(row_of(path), row_of(other)) for path, other in imports}
    tops = {(path.parts[0], other.parts[0]) for path, other in imports}
    permissions = [(row, folder) for row, folders in TABLE.items() for folder in folders]
    unused = [
        f"{row} -> {folder}"
        for row, folder in permissions
        if not any(one == row and covers(folder, other) for one, other in rows)
    ]
    unused += [f"{one} -> {two}" for one in LOWER for two in LOWER[one] if (one, two) not in tops]
    assert not unused, "\n".join(unused)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_command_line_imports_bench_inside_functions_only(command: Path) -> None:
    top_level = tree(command).body
    names = {node.module for node in top_level if isinstance(node, ast.ImportFrom) and node.module}
    assert not [name for name in names if name.startswith("bench")]


def test_the_scheduler_sees_integers_of_memory_only() -> None:
    for path in sources("serve/scheduler"):
        seen = {row_of(other) for other in imports_of(path) if other.parts[0] == "memory"}
        assert seen <= {"memory", "memory/pages", "memory/prefix"}, path


def edges_between(paths: Iterable[Path], *, folders: bool) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for path in paths:
        here = str(path.parent if folders else path)
        # A package's __init__ only hands names on: it belongs to no folder's work.
        if folders and (path.name == "__init__.py" or path in ENTRIES):
            continue
        for other in imports_of(path):
            if path in COMMANDS and other.parts[0] == "bench":
                continue
            there = str(other.parent if folders else other)
            if there != here:
                edges.setdefault(here, set()).add(there)
    return edges


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_no_circles(folders: bool) -> None:
    found = circles(edges_between(sources(*PACKAGES), folders=folders))
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_folder_of_modules_says_what_it_owns() -> None:
    for folder in {path.parent for path in sources(*PACKAGES)}:
        init = folder / "__init__.py"
        assert (ROOT / init).is_file(), f"{folder} has no __init__.py and is not packaged"
        assert ast.get_docstring(tree(init)), f"{init} has no docstring"


@pytest.mark.parametrize("folder", PURE)
def test_pure_folders(folder: str) -> None:
    for path in sources(folder):
        if str(path.parent) == folder and not str(path).startswith(NOT_PURE):
            tops = {name.partition(".")[0] for name in imported(path)}
            assert not tops & {"torch", "asyncio", "numpy", "aiohttp"}, path


def test_asyncio_stays_at_the_edge() -> None:
    for path in sources("serve"):
        if not str(path).startswith(ASYNCIO):
            assert "asyncio" not in {name.partition(".")[0] for name in imported(path)}, path


@pytest.mark.parametrize("package", [*PACKAGES, "examples"])
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    for path in sources(package):
        tops = {name.partition(".")[0] for name in imported(path)}
        assert not tops & FORBIDDEN_EVERYWHERE, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


def test_nothing_imports_tests() -> None:
    for path in sources(*PACKAGES, "examples"):
        assert "tests" not in {name.partition(".")[0] for name in imported(path)}, path
