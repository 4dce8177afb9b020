"""Keeps what trials of tokenizers' files have found, so that later starts need not try them again.

A trial takes longer than all the rest of a start. Only files that were accepted are kept, by a hash
of their content and of all that tries them. The folder is never one that comes with a model, and
neither it nor a file in it is used if another user could have written it: a record says that a
hostile file is harmless.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from serve.errors import reason
from serve.regular_file import is_trusted, open_trusted
from serve.text.tokenizer_file import MAX_GROWTH

logger = logging.getLogger(__name__)

MIN_FILE_BYTES = 128 << 10  # smaller ones are not of published models
MAX_RECORD_BYTES = 64 << 10
MAX_RECORDS = 64
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
    fd = open_trusted(_record(folder, key))
    if fd is None:
        return None
    try:
        content = os.read(fd, MAX_RECORD_BYTES + 1)
        with contextlib.suppress(OSError):  # a disk that is read only
            os.utime(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    try:
        if len(content) > MAX_RECORD_BYTES:
            return None
        values = json.loads(content)
        answer = values["answer"] if values["key"] == key else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return answer if _is_answer(answer) else None


def keep_answer(folder: Path, key: str, answer: dict[str, Any]) -> None:
    """Keeps an answer. A folder that cannot be written to, or that others can write to, keeps
    nothing."""
    content = json.dumps({"key": key, "answer": answer}).encode()
    if len(content) > MAX_RECORD_BYTES or not _is_answer(answer):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_trusted(folder):
            return
        _remove_oldest(folder)
        unfinished = folder / f"{_PREFIX}{key}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
        unfinished.rename(_record(folder, key))
    except OSError as error:
        logger.info("the tokenizer's trial is not kept in %s: %s", folder, reason(error))


def _record(folder: Path, key: str) -> Path:
    return folder / f"{_PREFIX}{key}.json"


def _remove_oldest(folder: Path) -> None:
    """Deletes records, and what stopped writers left, so that one more may be written."""
    found: list[tuple[int, Path]] = []
    for file in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found.append((file.lstat().st_mtime_ns, file))
    for _, file in sorted(found)[: max(0, len(found) - MAX_RECORDS + 1)]:
        with contextlib.suppress(OSError):
            file.unlink()


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
