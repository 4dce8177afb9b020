"""POST /internal/load: when the first token of a request would come here, for routers.

A body has the numbers of a prompt's tokens and of those that the asker takes for cached, or it is a
whole chat or completion, whose prompt is tokenized and looked up. Nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from serve.engine.early_rejection import TtftForecast
from serve.errors import RequestError
from serve.http.calls.chat_run import ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.generation import Generation
from serve.http.edge.errors import json_response
from serve.http.openai import requests as schema
from serve.http.openai.answer_schemas import COUNT, NUMBER, object_of
from serve.http.schema.describe import Operation
from serve.http.schema.fields import Integer, Record, String, Unknown
from serve.request import Request
from serve.sampling_params import SamplingParams

_ANY_CONTEXT = 1 << 24  # tokens; the model's own context is checked besides
NUMBERS = Record(
    {
        "model": String(512, min_chars=1),
        "prompt_tokens": Integer(1, _ANY_CONTEXT),
        "cached_tokens": Integer(0, _ANY_CONTEXT),
    },
    required=("prompt_tokens",),
)
LOAD_ANSWER = object_of(
    {
        "prompt_tokens": COUNT,
        "cached_tokens": COUNT,
        "predicted_ttft_seconds": NUMBER,
        "predicted_queue_seconds": NUMBER,
        "requests_running": COUNT,
        "requests_waiting": COUNT,
        "kv_cache_usage": NUMBER,
        "free_kv_tokens": COUNT,
    }
)


class LoadCall(NamedTuple):
    """A checked body: two numbers, a conversation or a prompt."""

    model: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chat: schema.ChatCall | None = None
    completion: schema.CompletionCall | None = None

    @property
    def max_tokens(self) -> int | None:
        call = self.completion if self.chat is None else self.chat.chat
        return None if call is None else call.params.max_tokens


def parse_load(body: Mapping[str, Any], defaults: Mapping[str, Any], unknown: Unknown) -> LoadCall:
    if "prompt_tokens" in body or not {"messages", "prompt"} & set(body):
        values = NUMBERS.check(body, "", unknown)
        asked = LoadCall(
            values.get("model"), values["prompt_tokens"], values.get("cached_tokens", 0)
        )
        if asked.cached_tokens > asked.prompt_tokens:
            raise RequestError("cached_tokens is above prompt_tokens", param="cached_tokens")
        return asked
    if "messages" in body:
        chat = schema.parse_chat(body, defaults, unknown)
        return LoadCall(chat.model, chat=chat)
    completion = schema.parse_completion(body, defaults, unknown)
    if len(completion.prompts) != 1:
        raise RequestError("a prediction is for one prompt", param="prompt")
    return LoadCall(completion.model, completion=completion)


def load_routes(context: ApiContext) -> list[Route]:
    async def load(call: Call) -> web.Response:
        defaults = context.engine.generation_defaults
        asked = await context.read(call, lambda body, unknown: parse_load(body, defaults, unknown))
        engine = call.engine
        if asked.chat is None and asked.completion is None:
            if asked.prompt_tokens > engine.max_model_len:
                most = engine.max_model_len
                raise RequestError(
                    f"prompt_tokens is above {most}, the model's context", param="prompt_tokens"
                )
            forecast = engine.forecast(asked.prompt_tokens, asked.cached_tokens)
            return _answer(call, asked.prompt_tokens, asked.cached_tokens, forecast)
        request = await _tokenized(call, asked)
        # which rows a kv_policy computes in any case depends on the answer's length
        whole = replace(request, params=request.params.changed(max_tokens=asked.max_tokens))
        # names of many pages take a while
        cached = await call.charge.run(lambda: engine.num_cached_tokens(whole))
        forecast = engine.forecast(request, cached)
        return _answer(call, len(request.prompt_token_ids), cached, forecast)

    body = {"anyOf": [NUMBERS.schema(), schema.CHAT.schema(), schema.COMPLETION.schema()]}
    described = Operation("When the first token of a request would come", LOAD_ANSWER, body)
    return [Route("/internal/load", {"POST": load}, describe={"POST": described})]


async def _tokenized(call: Call, asked: LoadCall) -> Request:
    """Has the engine tokenize and check the prompt, but not compute it."""
    if asked.chat is not None:
        chat = asked.chat.chat
        choice = "none" if chat.tool_choice == "none" else "auto"  # no grammar is compiled
        params = _only_tokenized(chat.params)
        with ChatRun(call, replace(chat, params=params, tool_choice=choice)) as run:
            await run.accepted()
            return run.generation.requests[0]
    assert asked.completion is not None
    stream = call.engine.submit(
        asked.completion.prompts[0],
        _only_tokenized(asked.completion.params),
        request_id=call.request_id,
        client=asked.completion.client,
        policy=call.policy,
    )
    with Generation([stream], 1, call.charge, call.policy) as generation:
        await generation.accepted()
        return generation.requests[0]


def _only_tokenized(params: SamplingParams) -> SamplingParams:
    """Returns the parameters on which the place in the queue and the cached prefix depend."""
    names = ("cache_salt", "kv_policy", "priority")
    return SamplingParams(max_tokens=0, **{name: getattr(params, name) for name in names})


def _answer(call: Call, num_tokens: int, num_cached: int, forecast: TtftForecast) -> web.Response:
    stats = call.engine.stats()
    free = max(0, stats.pages_total - stats.pages_in_use)
    answer = {
        "prompt_tokens": num_tokens,
        "cached_tokens": num_cached,
        "predicted_ttft_seconds": forecast.ttft_s,
        "predicted_queue_seconds": forecast.queue_s,
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
        "kv_cache_usage": stats.pages_in_use / max(1, stats.pages_total),
        "free_kv_tokens": free * stats.kv_page_bytes // max(1, stats.kv_bytes_per_token),
    }
    return json_response(answer, call.request_id)
