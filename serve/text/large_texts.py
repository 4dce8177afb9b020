"""Encodes large texts in a child process.

While they encode a text, the libraries take some hundred bytes for each of its characters. Then
they free an object for each token, a tenth of a microsecond each, with Python's global lock held:
for a million tokens the event loop would stop for 100 ms. In a child process neither concerns the
server, and a text that takes too much memory or time fails alone.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

from serve.errors import GenerationError, OverloadedError, RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError, WorkerLostError
from serve.text.tokenizer_check import MEMORY_PER_BYTE, CheckedFile

LARGE_CHARS = 1 << 17
MEMORY_BYTES = 4 << 30
TIMEOUT_S = 60.0
IDLE_S = 10.0
_MAX_MESSAGE_CHARS = 200
_PIECE_CHARS = 3 << 16  # of base64, which hold whole ids

logger = logging.getLogger(__name__)


class LargeTexts:
    """The child process of one tokenizer, which begins with the first large text and ends when
    there was none for IDLE_S seconds. It encodes one text at a time. Thread-safe."""

    def __init__(self, file: CheckedFile, growth: Callable[[str], float]) -> None:
        """growth: returns how many times longer the normalizer makes a text."""
        self._path = file.path
        # the child reads the file that was loaded, wherever it is by then
        self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        setup = {
            "library": file.library,
            "file": f"/proc/self/fd/{self._fd}",
            "sha256": file.sha256,
            "declared": file.declared,
            "names": file.names,
            "rules": file.rules,
        }
        self._max_growth = file.limits.growth
        self._growth = growth
        self._worker = BoundedWorker(
            Path(__file__).with_name("tokenizer_worker.py"),
            lambda: setup,
            name="the tokenizer",
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES + MEMORY_PER_BYTE * len(file.data),
            fds=(self._fd,),
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self._timer: threading.Timer | None = None

    def has(self, text: str) -> bool:
        """Returns whether a text is large, before or after it is normalized."""
        if len(text) > LARGE_CHARS or len(text) * self._max_growth <= LARGE_CHARS:
            return len(text) > LARGE_CHARS
        return len(text) * self._growth(text) > LARGE_CHARS

    def encode(self, text: str, kind: str) -> list[int]:
        """Returns the token ids. kind: see `make_encoder` in tokenizer_worker.py. Raises
        RequestError, and OverloadedError if the system has no room for the child process."""
        try:
            answer = self._worker.ask({"text": text, "kind": kind})
        except WorkerLostError as error:
            raise OverloadedError(f"no memory or time for a long text: {error}") from None
        except WorkerError as error:
            answer = {"error": f"{error} for a text of {len(text)} characters"}
        finally:
            self._rest_later()
        if "broken" in answer:
            logger.error("%s %s; large texts need it", self._path, answer["broken"])
            raise GenerationError("the tokenizer's file has changed since the model was loaded")
        if "ids" not in answer:
            raise encode_error(str(answer["error"]))
        return _decoded(answer["ids"])

    def worker_bytes(self) -> int:
        """Returns the resident memory of the child process."""
        return self._worker.resident_bytes()

    def close(self) -> None:
        """Ends the child process. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._worker.close()
        self._finalizer()

    def _rest_later(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_closed:
                return
            self._timer = threading.Timer(IDLE_S, self._worker.rest)
            self._timer.daemon = True
            self._timer.start()


def _decoded(text: str) -> list[int]:
    """Returns the ids of base64, in pieces, so that other threads go on between them."""
    ids: list[int] = []
    for start in range(0, len(text), _PIECE_CHARS):
        piece = array("I")
        piece.frombytes(base64.b64decode(text[start : start + _PIECE_CHARS]))
        ids += piece
    return ids


def encode_error(problem: str) -> RequestError:
    """Returns the error of a text that a tokenizer cannot encode."""
    message = f"the tokenizer cannot encode the text: {problem}"[:_MAX_MESSAGE_CHARS]
    return RequestError(message, param="prompt", code="invalid_prompt")
