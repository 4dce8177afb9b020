"""Targets for tokenizers' files: what the server's check accepts takes bounded memory in use.

The trial runs in the limited child process of the server, and what it accepts is used in this
process, as in the server.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.soak.mutate import MAX_INPUT
from serve.errors import ModelLoadError, RequestError
from serve.machine import process_bytes
from serve.sandbox.worker import BoundedWorker, WorkerError
from serve.text import tokenizer_check, tokenizer_worker
from serve.text.fast_codec import FastCodec
from serve.text.rank_file import RankRules
from serve.text.tokenizer_check import BASE_MEMORY_BYTES, CheckedFile, TextLimits
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.rank_files import tekken_file, tiktoken_file

NAMES = ("<s>",)
TEXTS = ("a" * 20_000, "aA1 \n'é字\u0301👍\ufdfa" * 1000, "\ufdfa" * 5000, "1" * 5000)
MAX_GROWTH_BYTES = 512 << 20
_FILES = (json.dumps(state()).encode() for state in make.pipelines().values())
SEEDS = tuple(file for file in _FILES if len(file) < MAX_INPUT)


RANK_RULES = RankRules(pattern=r"\s*\S+|\s+", names=("<s>",), filler="<{number}>", fillers=3)
_TOKENS = (*(bytes([byte]) for byte in range(256)), b"th", b"the", b"aa", b"aaaa", b" the", b"11")
_RANKS = {token: rank for rank, token in enumerate(_TOKENS)}
RANK_SEEDS = (tiktoken_file(_RANKS),)
TEKKEN_SEEDS = tuple(
    json.dumps(tekken_file(_RANKS, pattern=pattern)).encode() for pattern in (r"\s*\S+|\s+", ".")
)
assert all(len(seed) < MAX_INPUT for seed in (*RANK_SEEDS, *TEKKEN_SEEDS))


@functools.cache
def _trial() -> tuple[BoundedWorker, Path]:
    """Returns the child process, which answers for one file after the other, and the file."""
    folder = tempfile.TemporaryDirectory()
    worker = BoundedWorker(
        Path(tokenizer_worker.__file__),
        lambda: {"library": "tokenizers"},
        name="the trial",
        timeout_s=tokenizer_check.CHECK_TIMEOUT_S,
        memory_bytes=BASE_MEMORY_BYTES,
    )
    atexit.register(folder.cleanup)
    atexit.register(worker.close)
    return worker, Path(folder.name) / "tokenizer.json"


def run(data: bytes) -> None:
    """Raises AssertionError if a tokenizer.json that is accepted takes too much memory."""
    _run(data, None)


def run_ranks(data: bytes) -> None:
    """Does the same for a file of ranks."""
    _run(data, RANK_RULES.as_json())


def run_tekken(data: bytes) -> None:
    """Does the same for a tekken.json."""
    _run(data, RankRules(is_tekken=True).as_json())


def _run(data: bytes, rules: dict[str, Any] | None) -> None:
    worker, file = _trial()
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    question = {"file": str(file), "sha256": digest, "declared": None, "names": NAMES}
    try:
        answer = worker.ask(question | {"rules": rules})
    except WorkerError:  # the server refuses what takes too long
        return
    if "error" in answer:
        return
    limits = TextLimits(answer["growth"], tuple(answer["squares"].items()))
    before = process_bytes()
    checked = CheckedFile(file, data, digest, None, NAMES, limits, answer["decoder"], rules)
    try:
        codec = FastCodec(checked)
    except ModelLoadError:
        return
    for text in TEXTS:
        try:
            codec.decode(codec.encode(text, True), False)
        except RequestError:
            continue
        assert process_bytes() - before < MAX_GROWTH_BYTES, "too much memory"
