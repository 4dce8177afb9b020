"""Checks a tokenizer's file in a child process before this process loads it.

The file is untrusted: see tokenizer_file.py and tokenizer_worker.py for what it could do. The
content that has been checked is the content that is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve.checkpoint_json import read_bytes
from serve.config import default_model_path
from serve.errors import ModelLoadError, RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError
from serve.text.kept_trials import MIN_FILE_BYTES, keep_answer, kept_answer, trial_key
from serve.text.rank_file import RankRules, describe_ranks, encoded
from serve.text.tokenizer_file import check_description, read_description

MAX_FILE_BYTES = 256 << 20
CHECK_TIMEOUT_S = 60.0
# Both libraries take 12 to 20 bytes for a byte of a file with 256,000 tokens, as measured.
MEMORY_PER_BYTE = 32
BASE_MEMORY_BYTES = 1 << 30
# A million normalized characters take 435 MB to encode, as measured for NFKC of U+FDFA.
MAX_NORMALIZED_CHARS = 1_000_000
MAX_NORMALIZED_GROWTH = 2  # of a text that is itself longer
CHUNK_CHARS = 1024
SEARCHED_CHARS = 1 << 14
MAX_SPLIT_S = 5.0
MAX_REMEMBERED = 16

_remembering = threading.Lock()
_accepted: dict[str, dict[str, Any]] = {}
"""Answers of the child process by the hash of the question, which has the hash of the file: an
application that loads a checkpoint again does not wait for it again."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the tokenizer's trial has found about texts. growth: the most characters that its
    normalizer makes of one. squares: patterns of characters whose runs take the square of their
    length, and the seconds for each."""

    growth: float = 1.0
    squares: tuple[tuple[str, float], ...] = ()

    def check(self, text: str, normalize: Callable[[str], str]) -> None:
        """Raises RequestError for a text that would take too much memory or time."""
        if len(text) * self.growth > MAX_NORMALIZED_CHARS:
            _check_growth(text, normalize)
        for pattern, seconds in self.squares:
            if sum(size * size for size in _run_sizes(pattern, text)) * seconds > MAX_SPLIT_S:
                raise RequestError(
                    "the tokenizer takes too long to split a text with so many digits, letters or"
                    " spaces in a row",
                    param="prompt",
                    code="invalid_prompt",
                )

    def measure_growth(self, text: str, normalize: Callable[[str], str]) -> float:
        """Returns how many times longer normalize makes the text, at least 1.0. Bytes of UTF-8
        count as half a character, as some tokenizers make tokens of them."""
        if self.growth == 1.0:
            return 1.0
        chars = size = 0
        for part in _normalized(text, normalize):
            part_chars, part_bytes = _sizes(part)
            chars, size = chars + part_chars, size + part_bytes
        before = max(1, len(text), _sizes(text)[1] / 2)
        return max(1.0, max(chars, size / 2) / before)


def _run_sizes(pattern: str, text: str) -> Iterator[int]:
    """Yields the lengths of all runs of a class of characters. The text is searched in pieces,
    since a search keeps the interpreter from other threads."""
    runs = re.compile(f"{pattern}+")
    start = end = 0
    for piece in range(0, len(text), SEARCHED_CHARS):
        for run in runs.finditer(text, piece, piece + SEARCHED_CHARS):
            if run.start() > end:  # it does not continue the last run of the piece before
                yield end - start
                start = run.start()
            end = run.end()
    yield end - start


def _check_growth(text: str, normalize: Callable[[str], str]) -> None:
    allowed = max(MAX_NORMALIZED_CHARS, MAX_NORMALIZED_GROWTH * len(text))
    size = 0
    for part in _normalized(text, normalize):
        size += len(part)
        if size > allowed:
            raise RequestError(
                f"the tokenizer's normalizer makes more than {allowed} characters of the text's"
                f" {len(text)}",
                param="prompt",
                code="invalid_prompt",
            )


def _normalized(text: str, normalize: Callable[[str], str]) -> Iterator[str]:
    """Normalizes parts of a text, which shows its growth, but for what depends on text beyond a
    part."""
    for start in range(0, len(text), CHUNK_CHARS):
        yield normalize(text[start : start + CHUNK_CHARS])


def _sizes(text: str) -> tuple[int, int]:
    """Returns the numbers of characters and of bytes in UTF-8."""
    return len(text), len(text.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A tokenizer's file that may be loaded. declared, names: see load_fast in tokenizer_file.py.
    decoder: of tokenizer.json. rules: of a file of ranks, as JSON."""

    path: Path
    data: bytes = field(repr=False)
    sha256: str
    declared: object = None
    names: tuple[str, ...] = ()
    limits: TextLimits = TextLimits()
    decoder: object = None
    rules: dict[str, Any] | None = None

    @property
    def library(self) -> str:
        """The library that reads the file."""
        return library_of(self.path, self.rules)


def as_tokenizer_json(file: CheckedFile) -> bytes:
    """Returns the file's content, which is made for a file of ranks."""
    return file.data if file.rules is None else encoded(describe_ranks(file.data, file.rules))


def check_file(
    path: Path,
    declared: object = None,
    names: tuple[str, ...] = (),
    rules: RankRules | None = None,
    *,
    kept: Path | None = None,
) -> CheckedFile:
    """Reads and checks a tokenizer's file. rules: of a file of ranks. kept: the folder where
    trials are kept for the next start; None: nowhere. ModelLoadError names the file."""
    data = read_bytes(path, MAX_FILE_BYTES)
    question: dict[str, Any] = {
        "file": str(path),
        "sha256": hashlib.sha256(data).hexdigest(),
        "declared": declared,
        "names": names,
        "rules": None if rules is None else rules.as_json(),
    }
    key = hashlib.sha256(json.dumps(question).encode()).hexdigest()
    answer = _accepted.get(key)
    if answer is None and path.parent == default_model_path():
        answer = _describe(data)
    elif answer is None:
        answer = _ask_or_recall(question, len(data), kept)
        if "error" in answer:
            raise ModelLoadError(f"{path} {answer['error']}")
        _remember(key, answer)
    limits = TextLimits(answer["growth"], tuple(answer["squares"].items()))
    sha256 = question["sha256"]
    return CheckedFile(
        path, data, sha256, declared, names, limits, answer.get("decoder"), question["rules"]
    )


def _remember(key: str, answer: dict[str, Any]) -> None:
    with _remembering:
        while len(_accepted) >= MAX_REMEMBERED:
            del _accepted[next(iter(_accepted))]
        _accepted[key] = answer


def _describe(data: bytes) -> dict[str, Any]:
    """Returns the answer for the embedded model's file, which is a part of this program."""
    description = read_description(data)
    growth = check_description(description)
    return {"growth": growth, "squares": {}, "decoder": description.get("decoder")}


def library_of(path: Path, rules: dict[str, Any] | None) -> str:
    """Returns the library that reads a tokenizer's file."""
    return "sentencepiece" if path.suffix == ".model" and rules is None else "tokenizers"


def _ask_or_recall(question: dict[str, Any], size_bytes: int, kept: Path | None) -> dict[str, Any]:
    """Returns a trial's answer, which an earlier start may have kept."""
    if kept is None or size_bytes < MIN_FILE_BYTES:
        return _ask(question, size_bytes)
    trial = trial_key(question, library_of(Path(question["file"]), question["rules"]))
    answer = kept_answer(kept, trial)
    if answer is None:
        answer = _ask(question, size_bytes)
        if "error" not in answer:
            keep_answer(kept, trial, answer)
    return answer


def _ask(question: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    library = library_of(Path(question["file"]), question["rules"])
    worker = BoundedWorker(
        Path(__file__).with_name("tokenizer_worker.py"),
        lambda: {"library": library, "parent": os.getpid()},
        name="the tokenizer's trial",
        timeout_s=CHECK_TIMEOUT_S,
        memory_bytes=BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size_bytes,
    )
    try:
        return worker.ask(question)
    except WorkerError as error:
        return {"error": f"cannot be used: {error}"}
    finally:
        worker.close()
