"""Keeps what trials of tokenizers' files have found, so that later starts need not try them again.

A trial takes longer than all the rest of a start. Only files that were accepted are kept, by a hash
of their content and of all that tries them. The folder is never one that comes with a model, and
neither it nor a file in it is used if another user could have written it: a record says that a
hostile file is harmless.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from serve.regular_file import read_record, write_record
from serve.text.tokenizer_file import MAX_GROWTH

MIN_FILE_BYTES = 128 << 10  # smaller ones are not of published models
MAX_RECORD_BYTES = 64 << 10
_MAX_SQUARES = 64
_MAX_PATTERN_CHARS = 16
_PREFIX = "trial-"
_CODE = (
    "text/tokenizer_check.py",
    "text/tokenizer_worker.py",
    "text/tokenizer_file.py",
    "text/rank_file.py",
    "sandbox/worker.py",
    "sandbox/worker_main.py",
)


def trial_key(question: dict[str, Any], library: str) -> str:
    """Returns the hash of a trial: the file's content, what is declared beside it, the library, and
    the code that tries it."""
    told = {name: value for name, value in question.items() if name != "file"}
    version = importlib.metadata.version(library)
    digest = hashlib.sha256(json.dumps([told, library, version, sys.version]).encode())
    package = Path(__file__).parents[1]
    for name in _CODE:
        digest.update(hashlib.sha256((package / name).read_bytes()).digest())
    return digest.hexdigest()


def kept_answer(folder: Path, key: str) -> dict[str, Any] | None:
    """Returns the answer of a trial that accepted the file, None if none is kept that can be
    trusted."""
    content = read_record(folder, _name(key), MAX_RECORD_BYTES)
    if content is None:
        return None
    try:
        values = json.loads(content)
        answer = values["answer"] if values["key"] == key else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return answer if _is_answer(answer) else None


def keep_answer(folder: Path, key: str, answer: dict[str, Any]) -> None:
    """Keeps the answer of a trial that accepted the file."""
    content = json.dumps({"key": key, "answer": answer}).encode()
    if len(content) > MAX_RECORD_BYTES or not _is_answer(answer):
        return
    write_record(folder, _PREFIX, _name(key), content)


def _name(key: str) -> str:
    return f"{_PREFIX}{key}.json"


def _is_answer(answer: Any) -> bool:
    """Returns whether a record can be a trial's answer, whatever has become of it on the disk."""
    if not isinstance(answer, dict) or answer.keys() - {"growth", "squares", "decoder"}:
        return False
    growth, squares = answer.get("growth"), answer.get("squares")
    if type(growth) is not float or not 1.0 <= growth <= MAX_GROWTH:
        return False
    if not isinstance(squares, dict) or len(squares) > _MAX_SQUARES:
        return False
    return all(
        _is_pattern(pattern) and type(seconds) is float and 0 < seconds < math.inf
        for pattern, seconds in squares.items()
    )


def _is_pattern(text: str) -> bool:
    if len(text) > _MAX_PATTERN_CHARS:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True
