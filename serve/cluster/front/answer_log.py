"""Reads the journal of an answer (serve/http/calls/continuation.py), and makes its continuation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from serve.http.edge.limits import BODY_BYTES, JSON_CONTAINERS

_STATE = b": state "
_TOKENS = b": tokens "
_HANDOVER = b": handover"
_ERROR = b": error "
_COPIED = b": copied "
MAX_PENDING_BYTES = 64 << 20  # the last event of a response has all its log-probabilities

MAX_SCORES_BYTES = 4 << 20
"""Of the log-probabilities of one answer; of longer ones the last events lack those from before."""
MAX_SCORES_LISTS = JSON_CONTAINERS // 2
"""That they may have: servers refuse bodies of more containers than JSON_CONTAINERS."""


def scores_room(body_bytes: int) -> int:
    """Returns how many bytes of log-probabilities fit beside a body, and the tokens, in one that
    servers take by default: one that is too large would end the stream."""
    return max(0, min(MAX_SCORES_BYTES, (BODY_BYTES - body_bytes) // 2))


class JournalError(Exception):
    """A server's journal is malformed: its stream cannot be trusted."""


@dataclass(slots=True)
class _Answer:
    """What is known of a choice."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scores: list[Any] = field(default_factory=list)
    reasoning_tokens: int | None = None

    def add(self, token_ids: list[int], reason: str | None, more: dict[str, Any]) -> None:
        self.token_ids += token_ids
        self.finish_reason = reason
        self.scores += more.get("scores", ())
        self.reasoning_tokens = more.get("reasoning_tokens", self.reasoning_tokens)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }
        if self.scores and len(self.scores) == len(self.token_ids):
            value["scores"] = self.scores
        if self.reasoning_tokens is not None:
            value["reasoning_tokens"] = self.reasoning_tokens
        return value


class AnswerLog:
    """What is known of one call's answer. Feed it the bytes of the stream; it returns the events
    that may go to the client, which are those whose tokens are known.

    has_sent: whether the client has got any event. is_handed_over: the server has said that it is
    shutting down. error_code: that of the error that ends the stream. copied: the id of the engine
    that copies the K/V, "" if none does, and of how many tokens.
    """

    def __init__(self, max_scores_bytes: int | None = None) -> None:
        """max_scores_bytes: of log-probabilities that are kept; None: MAX_SCORES_BYTES."""
        self.has_sent = False
        self.is_handed_over = False
        self.error_code: str | None = None
        self.num_tokens = 0
        self.copied: tuple[str, int] = ("", 0)
        self._state: dict[str, Any] | None = None
        self._answers: dict[int, _Answer] = {}
        self._scores_bytes = self._scores_lists = 0
        given = max_scores_bytes
        self._max_scores_bytes = MAX_SCORES_BYTES if given is None else given
        self._num_events = 0
        self._given: dict[str, Any] | None = None
        self._rest = b""
        self._pending: list[bytes] = []

    def begin_stream(self) -> None:
        """Forgets the part of a stream that has broken off and that the client has not got."""
        self._rest, self._pending, self.is_handed_over = b"", [], False
        self.error_code = None
        if not self.has_sent:
            self._state = None  # the next server draws another seed

    def use(self, continuation: dict[str, Any]) -> None:
        """Takes what a server has handed over of an answer that is not streamed."""
        self._given = continuation

    def feed(self, data: bytes) -> bytes:
        """Returns the events that are complete with this part. Raises JournalError."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        ready = []
        for block in blocks:
            if not block.startswith(b":"):
                self._pending.append(block)
            elif block.startswith(_TOKENS):
                self._commit(block[len(_TOKENS) :])
                ready += self._take()
            elif block.startswith(_STATE):
                self._state = self._state or _json(block[len(_STATE) :])
            elif block.startswith(_HANDOVER):
                self.is_handed_over = True
            elif block.startswith(_ERROR):
                self.error_code = block[len(_ERROR) :].decode("utf-8", "replace")
            elif block.startswith(_COPIED):
                self._note_copies(block[len(_COPIED) :])
        if len(self._rest) + sum(map(len, self._pending)) > MAX_PENDING_BYTES:
            raise JournalError("a server sends events without their tokens")
        return self._joined(ready)

    def end(self) -> bytes:
        """Returns the last events, after a stream that has ended in order."""
        return self._joined(self._take())

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompts; 0 if the server does not tell."""
        number = (self._state or {}).get("num_tokens")
        return number if isinstance(number, int) else 0

    @property
    def is_over(self) -> bool:
        """Whether every choice that has begun has ended."""
        return all(answer.finish_reason is not None for answer in self._answers.values())

    @property
    def continuation(self) -> dict[str, Any] | None:
        """The field of the body with which another server goes on; None starts from the beginning,
        as the client has got nothing."""
        if self._given is not None:
            return self._given
        if self._state is None or not self.has_sent:
            return None
        count = max(self._answers, default=-1) + 1
        return {
            "state": self._state,
            "answers": [self._answers.get(i, _Answer()).to_json() for i in range(count)],
            "num_events": self._num_events,
        }

    def _commit(self, record: bytes) -> None:
        match _json(record):
            case [int(choice), list(token_ids), str() | None as reason] if choice >= 0:
                more: dict[str, Any] = {}
            case [int(choice), list(token_ids), str() | None as reason, dict(more)] if choice >= 0:
                if not isinstance(more.get("scores", []), list):
                    raise JournalError("a server's journal is malformed")
                if "scores" in more:
                    self._scores_bytes += len(record)
                    self._scores_lists += record.count(b"[")
            case _:
                raise JournalError("a server's journal is malformed")
        answer = self._answers.setdefault(choice, _Answer())
        answer.add(token_ids, reason, more)
        if not self._has_room:
            for one in self._answers.values():
                one.scores = []  # those of a part are worth nothing
        self._given = None  # from here on the stream's own tokens count
        self.num_tokens += len(token_ids)
        self.has_sent = True

    @property
    def _has_room(self) -> bool:
        """Whether the next server can take the log-probabilities."""
        return (
            self._scores_bytes <= self._max_scores_bytes and self._scores_lists <= MAX_SCORES_LISTS
        )

    def _note_copies(self, record: bytes) -> None:
        match _json(record):
            case [str(engine), int(num_tokens)] if num_tokens >= 0:
                self.copied = engine, num_tokens
            case _:
                raise JournalError("a server's journal is malformed")

    def _take(self) -> list[bytes]:
        taken, self._pending = self._pending, []
        self._num_events += len(taken)
        return taken

    def _joined(self, blocks: list[bytes]) -> bytes:
        if not blocks:
            return b""
        self.has_sent = True
        return b"\n\n".join(blocks) + b"\n\n"


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise JournalError("a server's journal is no JSON") from error
