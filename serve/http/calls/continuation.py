"""Lets another server go on with an answer, with the same next token.

Draws depend on (seed, position) alone and rows do not depend on their batch. So an answer is its
prompt, its parameters, its seed and its tokens so far, and any server with the same model and
precision can go on with it. A hop in front of such servers sends the header
`x-mergestep-journal: 1`. The events of a stream then come with comments, which no reader of
server-sent events sees:

    : state {...}                   before the first event: what the answer was made with
    : tokens [choice, ids, reason]  after the events of these tokens
    : copied [engine, tokens]       which peer copies the K/V, and of how many tokens; now and then
    : error CODE                    before an error that ends the stream
    : handover                      the last line of a server that is shutting down

The record of tokens has a fourth entry where the next server needs more than the tokens: the
log-probabilities that the last events repeat, and the number of tokens of reasoning.

The hop sends the same body to another server with one more field, `continuation`, of the state and
of each choice's tokens. Their events have been sent, so the stream begins with the next ones. An
answer that is not streamed begins with the first token again.
"""

from __future__ import annotations

import hashlib
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve.chat.answer_reader import ChatStep
from serve.errors import RequestError
from serve.http.edge.errors import SERVER_ERROR, ApiError
from serve.http.edge.limits import JSON_CONTAINERS
from serve.parameter_checks import check_int, parameters_named
from serve.request import Request, TokenDelta
from serve.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    SEED_LIMIT,
    AnswerSoFar,
    SamplingParams,
    TokenScores,
)
from serve.text.chat_parser import ToolCallStart

FIELD = "continuation"
NAMES = {"answers_so_far": FIELD}
JOURNAL_HEADER = "x-mergestep-journal"
HANDED_OVER = "handed_over"
MAX_REQUESTS = 1 << 11
_COPIED_S = 0.5  # between two looks where the K/V is copied
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DRAWN_ID = re.compile(r"call_[0-9a-f]{24}|[A-Za-z0-9]{9}")


class HandedOverError(ApiError):
    """The answer of a server that is shutting down to a call that another one can go on with.
    continuation: the field to send with the body; None where it starts anew."""

    def __init__(self, continuation: dict[str, Any] | None) -> None:
        super().__init__(
            503, "the server is shutting down", kind=SERVER_ERROR, code=HANDED_OVER, closes=True
        )
        self._continuation = continuation

    def body(self) -> bytes:
        value = orjson.loads(super().body())
        if self._continuation is not None:
            value[FIELD] = self._continuation
        return orjson.dumps(value)


@dataclass(frozen=True, slots=True)
class AnswerState:
    """What an answer was made with, beside its body. seeds and prompts: of each prompt of the
    call; prompts are digests of their tokens. num_tokens: of all prompts, for the hop."""

    answer_id: str
    created: int
    fingerprint: str
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    num_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "created": self.created,
            "fingerprint": self.fingerprint,
            "seeds": self.seeds,
            "prompts": self.prompts,
            "num_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True)
class Continuation:
    """The `continuation` of a body. answers: by choice, of which each prompt has n; the last
    ones may be left out. num_events: the events that have been sent for them. reasoning_tokens: of
    each answer; None: it is not known."""

    state: AnswerState
    answers: tuple[AnswerSoFar, ...]
    num_events: int = 0
    reasoning_tokens: tuple[int | None, ...] = ()

    def apply(self, params: SamplingParams, position: int) -> SamplingParams:
        """Returns the parameters of the call's prompt at this position. Raises RequestError if the
        continuation belongs to a call with other prompts or another n."""
        n, num_prompts = params.n, len(self.state.seeds)
        if position >= num_prompts or len(self.answers) > n * num_prompts:
            raise _invalid(f"{FIELD} has {len(self.answers)} answers, and n is {n}")
        answers = self.answers[position * n : (position + 1) * n]
        answers += (AnswerSoFar(),) * (n - len(answers))
        return params.changed(seed=self.state.seeds[position], answers_so_far=answers)

    def check(self, state: AnswerState) -> None:
        """Raises ApiError 409 unless this server makes the answer as the first one did."""
        for name, was, now in (
            ("model, version, precision or kv_policy", self.state.fingerprint, state.fingerprint),
            ("prompt", self.state.prompts, state.prompts),
        ):
            if was != now:
                raise ApiError(
                    409,
                    f"this server cannot go on with the answer: its {name} differs",
                    param=FIELD,
                    code="continuation_differs",
                )


def take_continuation(body: dict[str, Any]) -> Continuation | None:
    """Takes the field out of a body. Raises RequestError if it is not valid."""
    value = body.pop(FIELD, None)
    if value is None:
        return None
    state, answers = _field(value, "state", dict), _field(value, "answers", list)
    if len(answers) > MAX_REQUESTS * MAX_N:
        raise _invalid(f"{FIELD}.answers has more than {MAX_REQUESTS * MAX_N} entries")
    seeds, prompts = _field(state, "seeds", list), _field(state, "prompts", list)
    if not 0 < len(seeds) == len(prompts) <= MAX_REQUESTS:
        raise _invalid(f"{FIELD}.state must have a seed and a digest for each prompt")
    for seed in seeds:
        check_int(FIELD, seed, -SEED_LIMIT, SEED_LIMIT - 1)
    answer_id = _field(state, "id", str)
    if not _ID.fullmatch(answer_id):
        raise _invalid(f"{FIELD}.state.id must be 1 to 64 letters, digits, ., _ or -")
    created = _field(state, "created", int)
    check_int(FIELD, created, 0, 1 << 40)
    fingerprint = _field(state, "fingerprint", str)
    num_events = value.get("num_events", 0)
    check_int(f"{FIELD}.num_events", num_events, 0, 1 << 40)
    return Continuation(
        AnswerState(answer_id, created, fingerprint, tuple(seeds), tuple(map(str, prompts))),
        tuple(map(_answer, answers)),
        num_events,
        tuple(map(_reasoning_tokens, answers)),
    )


def _answer(value: Any) -> AnswerSoFar:
    token_ids, scores = _field(value, "token_ids", list), value.get("scores")
    if scores is not None and type(scores) is not list:
        raise _invalid(f"{FIELD}.scores must be a list")
    with parameters_named(NAMES):
        return AnswerSoFar(
            tuple(token_ids), value.get("finish_reason"), tuple(map(_scores, scores or ()))
        )


def _scores(value: Any) -> TokenScores:
    match value:
        case [float() | int() as logprob, int(rank), list(top)] if len(top) <= MAX_LOGPROBS:
            pairs = [(one[0], one[1]) for one in top if _is_pair(one)]
            if len(pairs) == len(top):
                return TokenScores(logprob, rank, tuple(pairs))
    raise _invalid(f"{FIELD}.scores must be log-probabilities")


def _is_pair(value: Any) -> bool:
    """Whether a value is a token id and a log-probability."""
    match value:
        case [int(token_id), float() | int()]:
            return 0 <= token_id < 1 << 31
    return False


def _reasoning_tokens(value: Any) -> int | None:
    number = value.get("reasoning_tokens")
    if number is not None:
        check_int(f"{FIELD}.reasoning_tokens", number, 0, 1 << 40)
    return number if number is None else int(number)


def _field(value: Any, name: str, kind: type) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise _invalid(f"{FIELD} needs the field {name}")
    return found


def _invalid(message: str) -> RequestError:
    return RequestError(message, param=FIELD, code="invalid_continuation")


@dataclass(slots=True)
class _Kept:
    """A choice of an answer that is not streamed."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scores: list[Any] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.scores += _records_of(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value

    def to_json(self) -> dict[str, Any]:
        value = {"token_ids": self.token_ids, "finish_reason": self.finish_reason}
        return value | {"scores": self.scores} if self.scores else value


def _records_of(delta: TokenDelta) -> list[Any]:
    """Returns the log-probabilities of a delta, in the form of a continuation."""
    return [[item.logprob, item.rank, item.top] for item in delta.logprobs or ()]


class Journal:
    """The comments of one answer, and what a server that shuts down hands over. has_comments: a hop
    reads them; else they are left out, and nothing is handed over. tells_scores: the last events
    repeat the log-probabilities, so the next server must know them. copied: tells of a request id
    which engine copies its K/V, and of how many tokens; None: none does."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        fingerprint: str,
        *,
        has_comments: bool = True,
        copied: Callable[[str], tuple[str, int] | None] | None = None,
    ) -> None:
        self.has_comments = has_comments
        self.answer_id = answer_id
        self.created = created
        self.is_handed_over = False
        self.tells_scores = False
        self._fingerprint = fingerprint
        self._state: AnswerState | None = None
        self._is_stated = False
        self._noted: tuple[int, TokenDelta] | None = None
        self._keeps = False
        self._kept: list[_Kept] = []
        self._reasoning: dict[int, int] = {}  # tokens by choice, if there were any
        self._copied = copied
        self._request_id = ""
        self._told: tuple[str, int] | None = None  # of copies
        self._looks_s = 0.0

    def begin(self, requests: Sequence[Request], num_choices: int) -> AnswerState:
        """Makes the state, once the prompts are tokenized."""
        self._state = AnswerState(
            self.answer_id,
            self.created,
            self._fingerprint,
            tuple(request.params.seed or 0 for request in requests),
            tuple(_digest(request.prompt_token_ids) for request in requests),
            sum(len(request.prompt_token_ids) for request in requests),
        )
        if len(requests) > 1:
            self._copied = None  # each may be copied elsewhere
        self._request_id = requests[0].request_id
        params = requests[0].params
        # log-probabilities of the prompt would be missing in a whole answer
        self._keeps = params.prompt_logprobs is None
        self._kept = [_Kept() for _ in range(num_choices)]
        return self._state

    def note(self, choice: int, delta: TokenDelta) -> None:
        """Takes what the next part of the answer is made of."""
        self._noted = choice, delta
        if self._keeps:
            self._kept[choice].add(delta)

    def note_reasoning(self, choice: int, num_tokens: int) -> None:
        """Takes how many tokens of a choice, up to those that were noted, are reasoning."""
        if num_tokens:
            self._reasoning[choice] = num_tokens

    def commit(self, events: bytes) -> bytes:
        """Returns the events of what was noted, with their comments; none if they were sent by
        another server."""
        self._keeps = False  # the hop keeps the tokens of a stream
        noted, self._noted = self._noted, None
        if noted is None:
            return events
        choice, delta = noted
        if delta.is_replayed:
            return b""
        if not self.has_comments:
            return events
        state = b""
        if not self._is_stated:
            assert self._state is not None
            self._is_stated = True
            state = b": state %s\n\n" % orjson.dumps(self._state.to_json())
        reason = delta.finish_reason
        record: list[Any] = [choice, delta.token_ids, None if reason is None else reason.value]
        more: dict[str, Any] = {}
        if choice in self._reasoning:
            more["reasoning_tokens"] = self._reasoning[choice]
        if self.tells_scores and delta.logprobs:
            more["scores"] = _records_of(delta)
        if more:
            record.append(more)
        noted_tokens = b"%s%s: tokens %s\n\n" % (state, events, orjson.dumps(record))
        return noted_tokens if self._copied is None else noted_tokens + self._copies()

    def _copies(self) -> bytes:
        """Returns the comment on copies, where it is not the one that was sent last."""
        now_s = time.monotonic()
        if self._copied is None or now_s < self._looks_s:
            return b""
        self._looks_s = now_s + _COPIED_S
        before, self._told = self._told, self._copied(self._request_id)
        if self._told == before:
            return b""
        return b": copied %s\n\n" % orjson.dumps(list(self._told or ("", 0)))

    def failed(self, last: bytes, code: str | None) -> bytes:
        """Returns the end of a stream that has failed. last: the event that says so."""
        if self.is_handed_over:
            return b": handover\n\n"
        return b": error %s\n\n%s" % ((code or "").encode(), last) if self.has_comments else last

    def named(self, step: ChatStep) -> ChatStep:
        """Returns the step with ids of calls that follow from the answer's id where they were drawn
        by chance, so that the server that goes on gives the same ones."""
        parts = [
            part._replace(call_id=self._call_id(step.choice, part))
            if isinstance(part, ToolCallStart)
            else part
            for part in step.parts
        ]
        return step._replace(parts=parts)

    def _call_id(self, choice: int, call: ToolCallStart) -> str:
        if not _DRAWN_ID.fullmatch(call.call_id):
            return call.call_id
        name = f"{self.answer_id}/{choice}/{call.number}".encode()
        prefix, _, drawn = call.call_id.rpartition("_")
        digest = hashlib.blake2b(name, digest_size=16).hexdigest()[: len(drawn)]
        return f"{prefix}_{digest}" if prefix else digest

    def hand_over(self) -> HandedOverError:
        """Returns the error that ends the call, so that the hop goes on elsewhere."""
        self.is_handed_over = True
        continuation = None
        if self._keeps and self._state is not None and self._fits():
            answers = [kept.to_json() for kept in self._kept]
            for choice, number in self._reasoning.items():
                answers[choice]["reasoning_tokens"] = number
            continuation = {"state": self._state.to_json(), "answers": answers}
        return HandedOverError(continuation)

    def _fits(self) -> bool:
        """Whether a server takes a body with all log-probabilities; without them the answer would
        lack some, so it begins anew then."""
        lists = sum(2 + len(top) for kept in self._kept for _, _, top in kept.scores)
        return lists <= JSON_CONTAINERS // 2


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).hexdigest()
