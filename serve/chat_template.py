"""Chat messages to prompt text, and keeping special tokens out of what users wrote.

Rendering happens in a child process with a deadline (see chat_template_worker.py): a template
that loops, grows or crashes costs its request, never the server. Knows no tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from serve.errors import EngineStoppedError, RequestError

WORKER = Path(__file__).with_name("chat_template_worker.py")
WORKER_MEMORY_BYTES = 1 << 30
STARTUP_TIMEOUT_S = 20.0
READ_SIZE = 1 << 16

# Inserted into special-token strings inside message contents, and split at after rendering.
# Random, so no client can know it; private-use characters, so no filter changes it.
SENTINEL = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))
# Behind the content of a last message that the model is to continue.
CONTINUE = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))


class ChatTemplate:
    """Renders one template in a child process. Thread-safe; one render at a time."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: dict[str, str],
        timeout_s: float = 2.0,
        max_output_chars: int = 4_000_000,
    ) -> None:
        self.source = source
        self._setup = {
            "source": source,
            "special_tokens": special_tokens,
            "max_chars": max_output_chars,
            "memory_bytes": WORKER_MEMORY_BYTES,
            "cpu_s": int(timeout_s) + 1,
        }
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._worker: _Worker | None = _Worker(self._setup)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text. RequestError when the template raises, times out or grows too large."""
        variables = {
            **(extra or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        line = json.dumps(variables).encode() + b"\n"
        with self._lock:
            answer = self._ask(line)
        if "text" not in answer:
            raise RequestError(f"cannot render the messages: {answer['error']}", param="messages")
        return str(answer["text"])

    def close(self) -> None:
        """Ends the child and waits for it. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._stop_worker()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop()

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self._is_closed:
            raise EngineStoppedError("the chat template is closed")
        if self._worker is not None and not self._worker.is_alive:
            self._stop_worker()
        worker = self._worker = self._worker or _Worker(self._setup)
        try:
            return worker.ask(line, self._timeout_s)
        except TimeoutError:
            problem = f"the chat template took longer than {self._timeout_s:g} s"
        except (OSError, ValueError):
            problem = "the chat template process ended while rendering"
        self._stop_worker()
        return {"error": problem}

    def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()


class _Worker:
    """One child process and its two pipes."""

    def __init__(self, setup: dict[str, Any]) -> None:
        # Started by path with -P: importing `serve` or finding `serve/http` first on the path
        # would be slow or wrong. An own session keeps Ctrl-C in a terminal away from it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback would hold prompt text
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None, "stdin is a pipe"
        assert self._process.stdout is not None, "stdout is a pipe"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._unsent = json.dumps(setup).encode() + b"\n"
        self._has_answered = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Sends a line and returns the answer. TimeoutError, OSError or ValueError if none."""
        allowed_s = timeout_s if self._has_answered else timeout_s + STARTUP_TIMEOUT_S
        deadline = time.monotonic() + allowed_s
        self._send(self._unsent + line, deadline)
        self._unsent = b""
        answer: dict[str, Any] = json.loads(self._receive(deadline))
        self._has_answered = True
        return answer

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self._stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._stdin.fileno(), view) :]

    def _receive(self, deadline: float) -> bytes:
        pieces: list[bytes] = []
        while True:
            _wait(self._stdout.fileno(), select.POLLIN, deadline)
            piece = os.read(self._stdout.fileno(), READ_SIZE)
            if not piece:
                raise ConnectionResetError("the chat template process ended")
            pieces.append(piece)
            if piece.endswith(b"\n"):  # one answer per question, so a newline is its end
                return b"".join(pieces)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
        raise TimeoutError


def flatten_content(content: Any) -> Any:
    """Text parts joined by newlines; anything else unchanged."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type", "text") == "text" for part in content
    ):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content


def neutralize(
    messages: Sequence[Mapping[str, Any]], special_tokens: Iterable[str]
) -> list[dict[str, Any]]:
    """A copy whose special-token strings are cut by the sentinel, wherever a client can write.

    Text parts are joined first: two harmless parts may form a special token together.
    """
    pattern = _pattern(tuple(special_tokens))
    return [
        {
            key: _cut(flatten_content(value) if key == "content" else value, pattern)
            for key, value in message.items()
        }
        for message in messages
    ]


def neutralize_value(value: Any, special_tokens: Iterable[str]) -> Any:
    """The same for any JSON value, names of objects' members too."""
    return _cut(value, _pattern(tuple(special_tokens)))


def split_neutralized(text: str) -> list[str]:
    """The segments to encode one by one, so that no special token spans user text."""
    return [segment for segment in text.split(SENTINEL) if segment]


@lru_cache(maxsize=8)
def _pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    """Longest first. A token of one character cannot be cut and is left alone."""
    tokens = sorted({token for token in special_tokens if len(token) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def _cut(value: Any, pattern: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return value if pattern is None else _cut_text(value, pattern)
    if isinstance(value, Mapping):
        return {_cut(key, pattern): _cut(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(item, pattern) for item in value]
    return value


def _cut_text(text: str, pattern: re.Pattern[str]) -> str:
    """Cuts after the first character of every match, overlapping ones too: the search goes on
    one character later."""
    pieces: list[str] = []
    start = 0
    match = pattern.search(text)
    while match is not None:
        cut = match.start() + 1
        pieces.append(text[start:cut])
        start = cut
        match = pattern.search(text, cut)
    if not pieces:
        return text
    pieces.append(text[start:])
    return SENTINEL.join(pieces)
