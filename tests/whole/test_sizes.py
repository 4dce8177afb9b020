"""Folders, files and functions are small enough to read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.source_tree import PACKAGES, ROOT, sources, tree

MAX_MODULES = 22
MAX_FILE_LINES = 400
MAX_BODY_LINES = 60
FOLDERS = (*PACKAGES, "tests", "examples")


def test_no_folder_has_too_many_modules() -> None:
    folders: dict[Path, int] = {}
    for path in sources(*FOLDERS):
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {folder: n for folder, n in folders.items() if n > MAX_MODULES} == {}


def test_no_file_is_too_long() -> None:
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in sources(*FOLDERS)}
    assert {path: n for path, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    """The signature and the docstring do not count. Triton kernels are exempt, since each part of
    one that becomes a function takes all its tiles, strides and constants as arguments."""
    too_long = [
        f"{path}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for path in sources(*FOLDERS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_BODY_LINES
        and not is_kernel(node)
    ]
    assert not too_long, "\n".join(too_long)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines from the first statement after the docstring to the end."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(name.partition("(")[0] == "triton.jit" for name in decorators)
