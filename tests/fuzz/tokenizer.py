"""The target for tokenizer.json: what the server's check accepts takes bounded memory in use.

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

from bench.soak.mutate import MAX_INPUT
from serve.errors import ModelLoadError, RequestError
from serve.machine import process_bytes
from serve.sandbox.worker import BoundedWorker, WorkerError
from serve.text import tokenizer_check, tokenizer_worker
from serve.text.fast_codec import FastCodec
from serve.text.tokenizer_check import BASE_MEMORY_BYTES, CheckedFile, TextLimits
from tests.support.engine import tokenizer_pipelines as make

NAMES = ("<s>",)
TEXTS = ("a" * 20_000, "aA1 \n'é字\u0301👍\ufdfa" * 1000, "\ufdfa" * 5000, "1" * 5000)
MAX_GROWTH_BYTES = 512 << 20
_FILES = (json.dumps(state()).encode() for state in make.pipelines().values())
SEEDS = tuple(file for file in _FILES if len(file) < MAX_INPUT)


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
    """Raises AssertionError if a file that is accepted takes too much memory."""
    worker, file = _trial()
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    question = {"file": str(file), "sha256": digest, "declared": None, "names": NAMES}
    try:
        answer = worker.ask(question)
    except WorkerError:  # the server refuses what takes too long
        return
    if "error" in answer:
        return
    limits = TextLimits(answer["growth"], tuple(answer["squares"].items()))
    before = process_bytes()
    try:
        codec = FastCodec(CheckedFile(file, data, digest, None, NAMES, limits, answer["decoder"]))
    except ModelLoadError:
        return
    for text in TEXTS:
        try:
            codec.decode(codec.encode(text, True), False)
        except RequestError:
            continue
        assert process_bytes() - before < MAX_GROWTH_BYTES, "too much memory"
