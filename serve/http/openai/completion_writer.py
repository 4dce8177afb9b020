"""Writes the answer of a completion, whole or as events, with echo, best_of and usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from serve.errors import RequestError
from serve.http.calls.answer_head import AnswerHead
from serve.http.calls.generation import Generation
from serve.http.edge.large_json import (
    CHARS_PER_VALUE,
    INLINE_VALUES,
    drained,
    json_list,
    large_response,
)
from serve.http.edge.memory_budget import LOGPROB_BYTES, Charge
from serve.http.edge.sse import DONE, EventStream
from serve.http.openai import shapes
from serve.http.openai.requests import CompletionCall
from serve.request import TokenDelta, TokenLogprobs

MAX_PROMPT_LOGPROBS = 1 << 18  # numbers; each takes some hundred bytes while the answer is made
MAX_REPEATED_TOKENS = 1 << 20
FIELDS = 8  # the fields of a choice


def charge_size(asked: CompletionCall, generation: Generation, charge: Charge) -> None:
    """Charges the log-probabilities of the answer. Raises RequestError if there are too many, or if
    it would repeat too much of the prompts."""
    repeats = "echo" if asked.echo else "return_token_ids" if asked.return_token_ids else None
    num_tokens = generation.prompt_tokens * asked.num_choices
    if repeats is not None and num_tokens > MAX_REPEATED_TOKENS:
        raise RequestError(
            f"{repeats} repeats {num_tokens} tokens of the prompts; at most "
            f"{MAX_REPEATED_TOKENS} are allowed",
            param=repeats,
        )
    if not asked.stream:
        generation.charge_logprobs("best_of" if asked.logprobs is None else "logprobs")
    if asked.params.prompt_logprobs is None:
        return
    size = generation.prompt_tokens * (1 + asked.params.prompt_logprobs)
    copies = asked.num_choices if asked.echo else 1
    param = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
    if size * copies > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the prompts' log-probabilities are {size * copies} numbers; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed",
            param=param,
        )
    charge.add(LOGPROB_BYTES * size * copies, param)


@dataclass(slots=True)
class _Candidate:
    """One sequence, collected from its deltas."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        items = self.logprobs or ()
        return sum(item.logprob for item in items) / len(items) if items else float("-inf")


@dataclass(frozen=True, slots=True)
class ChoiceWriter:
    """Formats the choices of one call."""

    asked: CompletionCall
    generation: Generation
    tokenizer: shapes.TokenTexts

    def prompt_text(self, position: int) -> str:
        """Returns the prompt's text, decoded if the prompt was truncated or came as tokens."""
        prompt = self.asked.prompts[position]
        text: object = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        is_cut = isinstance(prompt, dict) and "truncate_prompt_tokens" in prompt
        if isinstance(text, str) and not is_cut:
            return text
        return self.tokenizer.decode(
            self.generation.requests[position].prompt_token_ids,
            skip_special_tokens=self.asked.params.skip_special_tokens,
        )

    def logprobs(
        self,
        before: Iterable[TokenLogprobs | None] | None,
        items: Iterable[TokenLogprobs] | None,
        position: int,
        offset: int = 0,
    ) -> tuple[dict[str, Any] | None, int]:
        """Returns the log-probabilities and the text offset of the next token. before: those of the
        prompt, if it is echoed. offset: the text offset of the first token."""
        num_top = self.asked.logprobs
        if num_top is None or (before is None and items is None):
            return None, offset
        return shapes.completion_logprobs(
            [*(before or ()), *(items or ())],
            self.tokenizer,
            offset,
            num_top=num_top,
            first_token=self.generation.requests[position].prompt_token_ids[0],
            hides_special=self.asked.params.skip_special_tokens,
        )

    def choice(self, index: int, position: int, output: _Candidate) -> dict[str, Any]:
        asked = self.asked
        echoed = output.prompt_logprobs if asked.echo else None
        choice: dict[str, Any] = {
            "index": index,
            "text": (self.prompt_text(position) if asked.echo else "") + "".join(output.texts),
            "logprobs": self.logprobs(echoed, output.logprobs, position)[0],
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if asked.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shapes.prompt_logprobs(
                output.prompt_logprobs, self.tokenizer, asked.prompt_logprobs
            )
        for _ in drained(output.logprobs or []):
            pass  # frees them one by one
        if asked.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = self.generation.requests[position].prompt_token_ids
        return choice


async def whole_answer(
    generation: Generation,
    head: AnswerHead,
    writer: ChoiceWriter,
    request_id: str,
    more: Callable[[], dict[str, Any]] = dict,
) -> web.Response:
    """Answers with the best choices of each prompt. more: returns further fields at the end."""
    asked = writer.asked
    outputs = [_Candidate() for _ in range(generation.num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            outputs[choice].extend(delta)

    def choices() -> Iterator[dict[str, Any]]:
        for position in range(len(asked.prompts)):
            of_prompt = outputs[position * asked.params.n : (position + 1) * asked.params.n]
            if len(of_prompt) > asked.num_choices:
                of_prompt.sort(key=lambda output: -output.mean_logprob)
            for number, output in enumerate(of_prompt[: asked.num_choices]):
                yield writer.choice(position * asked.num_choices + number, position, output)

    num_tokens = sum(len(output.token_ids) for output in outputs)
    usage = shapes.usage(generation.prompt_tokens, num_tokens, generation.cached_tokens)
    fields = more()

    def answer() -> dict[str, Any]:
        return {
            "id": head.answer_id,
            "object": head.kind.object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": json_list(choices(), 1),
            "usage": usage,
            **fields,
        }

    size = _num_values(asked, generation.prompt_tokens, outputs)
    return await large_response(answer, size, request_id, generation.charge)


def _num_values(asked: CompletionCall, prompt_tokens: int, outputs: list[_Candidate]) -> int:
    """Returns the approximate number of values in the answer."""
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_chars = sum(len(text) for output in outputs for text in output.texts)
    size = FIELDS * len(outputs) + num_chars // CHARS_PER_VALUE
    if asked.params.logprobs is not None:
        size += num_tokens * (1 + asked.params.logprobs)
    if asked.params.prompt_logprobs is not None:
        size += prompt_tokens * (1 + asked.params.prompt_logprobs)
    if asked.return_token_ids or asked.echo:
        size += num_tokens + prompt_tokens * asked.num_choices
    return size


class CompletionStreamWriter:
    """Writes the deltas of one completion as events. The constant parts of chunks are made once: a
    token costs one call of orjson and one write."""

    def __init__(self, generation: Generation, head: AnswerHead, writer: ChoiceWriter) -> None:
        self._generation = generation
        self._writer = writer
        asked = self._asked = writer.asked
        fields = {
            "id": head.answer_id,
            "object": head.kind.object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._head = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if asked.include_usage else b"]}\n\n"
        self._before_text = [
            self._head + b'{"index":%d,"text":' % index for index in range(generation.num_choices)
        ]
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._is_plain = not (
            asked.logprobs is not None or asked.return_token_ids or asked.continuous_usage
        )
        self._opened: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._num_tokens = 0

    async def run(self, events: EventStream) -> web.StreamResponse:
        """Sends the events. An error raises until the head is sent; after that it becomes the last
        event."""
        return await events.send_all(self._parts(), lambda e: b"data: " + e.body() + b"\n\n")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._generation.deltas()) as deltas:
            async for choice, delta in deltas:
                yield await self._encode(choice, delta)
        yield self._ending()

    async def _encode(self, choice: int, delta: TokenDelta) -> bytes:
        self._num_tokens += len(delta.token_ids)
        data = b""
        if delta.is_replayed and self._asked.logprobs is not None:
            # only for the offsets of the next tokens
            delta = delta._replace(logprobs=[TokenLogprobs(t, 0.0) for t in delta.token_ids])
        if choice not in self._opened:
            self._opened.add(choice)
            data = await self._opening(choice, delta)
        if not self._is_plain:
            if delta.text or delta.logprobs or (self._asked.return_token_ids and delta.token_ids):
                data += self._full(choice, delta)
        elif delta.text:
            data += self._before_text[choice] + orjson.dumps(delta.text) + self._after_text
        if delta.finish_reason is not None:
            data += self._chunk(
                {
                    "index": choice,
                    "text": "",
                    "logprobs": None,
                    "finish_reason": delta.finish_reason.value,
                    "stop_reason": delta.stop_reason,
                }
            )
        return data

    async def _opening(self, choice: int, delta: TokenDelta) -> bytes:
        """Returns the first chunk of a choice, with what the client requests of its prompt."""
        asked, position = self._asked, choice // self._asked.params.n
        if not asked.echo and not asked.return_token_ids:
            return b""
        opening: dict[str, Any] = {
            "index": choice,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
        }
        if asked.echo:
            scores = delta.prompt_logprobs
            size = len(self._generation.requests[position].prompt_token_ids)
            if scores is not None:
                size *= 1 + (asked.logprobs or 0)

            def fill() -> None:
                opening["text"] = self._writer.prompt_text(position)
                opening["logprobs"] = self._logprobs(choice, scores, None)

            await self._generation.charge.finish(fill) if size > INLINE_VALUES else fill()
        if asked.return_token_ids:
            opening["prompt_token_ids"] = self._generation.requests[position].prompt_token_ids
        return self._chunk(opening)

    def _full(self, choice: int, delta: TokenDelta) -> bytes:
        fields: dict[str, Any] = {
            "index": choice,
            "text": delta.text,
            "logprobs": self._logprobs(choice, None, delta.logprobs),
            "finish_reason": None,
        }
        if self._asked.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return self._chunk(fields)

    def _logprobs(
        self,
        choice: int,
        before: Sequence[TokenLogprobs | None] | None,
        items: Sequence[TokenLogprobs] | None,
    ) -> dict[str, Any] | None:
        position = choice // self._asked.params.n
        offset = self._offsets.get(choice, 0)
        answer, self._offsets[choice] = self._writer.logprobs(before, items, position, offset)
        return answer

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        tail = self._tail
        if self._asked.continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
        return self._head + orjson.dumps(choice) + tail

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return shapes.usage(generation.prompt_tokens, self._num_tokens, generation.cached_tokens)

    def _ending(self) -> bytes:
        if not self._asked.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n" + DONE
