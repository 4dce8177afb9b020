"""Renders chat messages as prompt text, without special tokens from the text of users.

A child process renders under a deadline (chat_template_worker.py), so that a template that loops,
grows or crashes fails its request and not the server. Nothing here knows the tokenizer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from serve.errors import OverloadedError, RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError, WorkerLostError

WORKER_MEMORY_BYTES = 1 << 30

# The sentinel is inserted into special-token strings inside message contents, and the rendered text
# is split at it. It is random, so that no client knows it, and consists of private-use characters,
# so that no filter changes it.
SENTINEL = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))
# This marker follows the content of a last message that the model has to continue.
CONTINUE = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))

_SEARCH_CHARS = 64 << 10  # how much is searched at once, since that holds the interpreter

_NOT_RENDERED = "cannot render the messages: "
_QUESTION = {"role": "user", "content": "Hello!"}
# Templates may ask for a system message or refuse one, or want contents as lists of parts.
_TRIALS: tuple[list[dict[str, Any]], ...] = (
    [_QUESTION],
    [{"role": "system", "content": "Be brief."}, _QUESTION],
    [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
)


class ChatTemplate:
    """Renders a model's template in a child process, one prompt at a time. Thread-safe.

    tool_source: the template of conversations with tools, where it is another one.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: dict[str, str],
        tool_source: str | None = None,
        timeout_s: float = 2.0,
        max_output_chars: int = 4_000_000,
    ) -> None:
        self.source = source
        setup = {
            "source": source,
            "tool_source": tool_source,
            "special_tokens": special_tokens,
            "max_chars": max_output_chars,
        }
        self._worker = BoundedWorker(
            Path(__file__).with_name("chat_template_worker.py"),
            lambda: setup,
            name="the chat template",
            timeout_s=timeout_s,
            memory_bytes=WORKER_MEMORY_BYTES,
        )
        self._worker.start()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """Returns the prompt; RequestError if the template raises, times out or grows too large,
        OverloadedError if the system has no room for the child process."""
        try:
            answer = self._worker.ask(
                {
                    "documents": None,
                    **(extra or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except WorkerLostError as error:
            raise OverloadedError(f"{_NOT_RENDERED}{error}") from None
        except WorkerError as error:
            answer = {"error": str(error)}
        if "text" not in answer:
            raise RequestError(f"{_NOT_RENDERED}{answer['error']}", param="messages")
        return str(answer["text"])

    def worker_bytes(self) -> int:
        """Returns the resident memory of the child process."""
        return self._worker.resident_bytes()

    def find_problem(self) -> str | None:
        """Returns why none of several plain conversations can be rendered, None if one can."""
        problems = []
        for messages in _TRIALS:
            try:
                self.render(messages)
            except (RequestError, OverloadedError) as error:
                problems.append(str(error).removeprefix(_NOT_RENDERED))
            else:
                return None
        return problems[0]

    def close(self) -> None:
        """Ends the child process and waits for it. Idempotent."""
        self._worker.close()


def flatten_content(content: Any) -> Any:
    """Joins text parts by newlines; returns other content unchanged."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type", "text") == "text" for part in content
    ):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content


def neutralize(
    messages: Sequence[Mapping[str, Any]], special_tokens: Iterable[str]
) -> list[dict[str, Any]]:
    """Returns a copy whose special-token strings are cut by the sentinel in every client text.

    Text parts are joined first, since two harmless parts may form a special token together.
    """
    tokens = _tokens(tuple(special_tokens))
    return [
        {
            key: _cut(flatten_content(value) if key == "content" else value, tokens)
            for key, value in message.items()
        }
        for message in messages
    ]


def neutralize_value(value: Any, special_tokens: Iterable[str]) -> Any:
    """Does the same for any JSON value, including the keys of objects."""
    return _cut(value, _tokens(tuple(special_tokens)))


def split_neutralized(text: str) -> list[str]:
    """Returns the segments to encode one by one, so that none forms a special token."""
    return [segment for segment in text.split(SENTINEL) if segment]


class _Tokens(NamedTuple):
    """Special tokens. pattern: matches each of them."""

    pattern: re.Pattern[str]
    max_chars: int


@lru_cache(maxsize=8)
def _tokens(special_tokens: tuple[str, ...]) -> _Tokens | None:
    """A token of one character cannot be cut and is left as it is."""
    tokens = sorted({token for token in special_tokens if len(token) > 1}, key=len, reverse=True)
    if not tokens:
        return None
    return _Tokens(re.compile("|".join(map(re.escape, tokens))), len(tokens[0]))


def _cut(value: Any, tokens: _Tokens | None) -> Any:
    if isinstance(value, str):
        return value if tokens is None else _cut_text(value, tokens)
    if isinstance(value, Mapping):
        return {_cut(key, tokens): _cut(item, tokens) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(item, tokens) for item in value]
    return value


def _cut_text(text: str, tokens: _Tokens) -> str:
    """Cuts after the first character of every match, including overlapping ones."""
    pieces: list[str] = []
    start = 0
    for cut in _cuts(text, tokens):
        pieces.append(text[start:cut])
        start = cut
    if not pieces:
        return text
    pieces.append(text[start:])
    return SENTINEL.join(pieces)


def _cuts(text: str, tokens: _Tokens) -> Iterator[int]:
    """Yields where to cut. It searches in pieces, so that other threads go on between them."""
    search = tokens.pattern.search
    for first in range(0, len(text), _SEARCH_CHARS):
        end = first + _SEARCH_CHARS
        match = search(text, first, end + tokens.max_chars)
        while match is not None and match.start() < end:
            cut = match.start() + 1
            yield cut
            match = search(text, cut, end + tokens.max_chars)
