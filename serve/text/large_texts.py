"""Encodes large texts in a child process.

The libraries take some hundred bytes for a character of a text until it is encoded, and freeing
them holds the interpreter for a tenth of a microsecond each. In a process of its own neither
concerns the server, and a text that takes too much memory or time fails alone.
"""

from __future__ import annotations

import base64
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

from serve.errors import RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError
from serve.text.tokenizer_check import CheckedFile, library_of

LARGE_CHARS = 1 << 17
MEMORY_BYTES = 4 << 30
TIMEOUT_S = 60.0
IDLE_S = 10.0
_MAX_MESSAGE_CHARS = 200


class LargeTexts:
    """The child process of one tokenizer, which begins with the first large text and ends when
    there was none for IDLE_S seconds. It encodes one text at a time. Thread-safe."""

    def __init__(self, file: CheckedFile, growth: Callable[[str], float]) -> None:
        """growth: returns how many times longer the normalizer makes a text."""
        setup = {
            "library": library_of(file.path),
            "file": str(file.path),
            "sha256": file.sha256,
            "declared": file.declared,
            "names": file.names,
        }
        self._max_growth = file.limits.growth
        self._growth = growth
        self._worker = BoundedWorker(
            Path(__file__).with_name("tokenizer_worker.py"),
            lambda: setup,
            name="the tokenizer",
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
        )
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def has(self, text: str) -> bool:
        """Returns whether a text is large, before or after it is normalized."""
        if len(text) > LARGE_CHARS or len(text) * self._max_growth <= LARGE_CHARS:
            return len(text) > LARGE_CHARS
        return len(text) * self._growth(text) > LARGE_CHARS

    def encode(self, text: str, kind: str) -> list[int]:
        """Returns the token ids. kind: see `make_encoder` in tokenizer_worker.py. Raises
        RequestError."""
        try:
            answer = self._worker.ask({"text": text, "kind": kind})
        except WorkerError as error:
            answer = {"error": f"{error} for a text of {len(text)} characters"}
        finally:
            self._rest_later()
        if "ids" not in answer:
            raise encode_error(str(answer["error"]))
        ids = array("I")
        ids.frombytes(base64.b64decode(answer["ids"]))
        return ids.tolist()

    def worker_bytes(self) -> int:
        """Returns the resident memory of the child process."""
        return self._worker.resident_bytes()

    def close(self) -> None:
        """Ends the child process. Idempotent."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
        self._worker.close()

    def _rest_later(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(IDLE_S, self._worker.rest)
            self._timer.daemon = True
            self._timer.start()


def encode_error(problem: str) -> RequestError:
    """Returns the error of a text that a tokenizer cannot encode."""
    message = f"the tokenizer cannot encode the text: {problem}"[:_MAX_MESSAGE_CHARS]
    return RequestError(message, param="prompt", code="invalid_prompt")
