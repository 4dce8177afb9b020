"""/v1/responses: OpenAI's Responses API and its stored responses."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from serve.chat.request import ChatRequest
from serve.errors import RequestError
from serve.http.calls.answer_head import event_stream
from serve.http.calls.answer_writer import write_stream, write_whole
from serve.http.calls.chat_run import ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.messages import MAX_MESSAGES
from serve.http.edge.errors import ApiError, body_response, json_response, quoted
from serve.http.edge.large_json import CHARS_PER_VALUE, json_bytes, large_response
from serve.http.edge.memory_budget import STORED_BYTES
from serve.http.responses import description
from serve.http.responses.items import REFERENCE
from serve.http.responses.listing import item_list, kept_items, named_items
from serve.http.responses.requests import ResponseCall, parse_count_call, parse_response_call
from serve.http.responses.response_head import response_head
from serve.http.responses.response_writer import ResponseWriter
from serve.http.responses.store import ResponseStore, StoredResponse
from serve.kept import Kept
from serve.parameter_checks import parameters_named
from serve.sampling_params import SamplingParams

TURN_BYTES = 1 << 20
# The names of this API by those of SamplingParams and the engine.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "structured": "text.format.schema",
}


def response_routes(context: ApiContext) -> list[Route]:
    endpoints = _Endpoints(context)
    return [
        Route(
            "/v1/responses",
            {"POST": endpoints.create},
            describe={"POST": description.CREATE},
        ),
        Route(
            "/v1/responses/input_tokens",
            {"POST": endpoints.input_tokens},
            describe={"POST": description.COUNT},
        ),
        Route(
            "/v1/responses/{response_id}",
            {"GET": endpoints.fetch, "DELETE": endpoints.delete},
            describe={"GET": description.FETCH, "DELETE": description.DELETE},
        ),
        Route(
            "/v1/responses/{response_id}/input_items",
            {"GET": endpoints.input_items},
            describe={"GET": description.INPUT_ITEMS},
        ),
        Route(
            "/v1/responses/{response_id}/cancel",
            {"POST": endpoints.cancel},
            describe={"POST": description.CANCEL},
        ),
    ]


class _Conversation(NamedTuple):
    """The parts of a request that depend on stored responses. history: lists of items as JSON, to
    be stored: those that the request continues and its own. head: see response_head."""

    history: tuple[bytes, ...]
    chat: ChatRequest
    head: dict[str, Any]


class _Endpoints:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        settings = context.settings
        self._turn = asyncio.Lock()
        self._store = store = ResponseStore(settings.max_responses, settings.max_responses_bytes)
        context.kept["responses"] = lambda: Kept(len(store), store.size_bytes)

    async def create(self, call: Call) -> web.StreamResponse:
        parse = partial(parse_response_call, defaults=call.engine.generation_defaults)
        asked = await self._context.read(call, lambda body, unknown: parse(body, unknown=unknown))
        with parameters_named(NAMES):
            conversation, run = await self._begin(call, asked)
            with run:
                run.generation.charge_logprobs("top_logprobs")
                return await self._answer(call, asked, run, conversation)

    async def input_tokens(self, call: Call) -> web.Response:
        asked = await self._context.read(call, parse_count_call)
        with parameters_named(NAMES):
            # max_tokens 0: rendered, but never scheduled
            _, run = await self._begin(call, asked, SamplingParams(max_tokens=0))
            with run:
                counts = {"object": "response.input_tokens", "input_tokens": run.prompt_tokens}
                return json_response(counts, call.request_id)

    async def fetch(self, call: Call) -> web.Response:
        stored = self._stored(call)
        if call.request.query.get("stream", "false") != "false":
            raise RequestError(
                "stream must be false: only background responses can be streamed again",
                param="stream",
            )
        return body_response(stored.body, call.request_id)

    async def delete(self, call: Call) -> web.Response:
        if not self._store.delete(call.argument, _owner(call)):
            raise _not_found(call.argument)
        gone = {"id": call.argument, "object": "response", "deleted": True}
        return json_response(gone, call.request_id)

    async def input_items(self, call: Call) -> web.Response:
        stored, query = self._stored(call), call.request.query
        num_bytes = sum(map(len, stored.history))
        call.charge.add(STORED_BYTES * num_bytes)

        def listed() -> dict[str, Any]:
            return item_list(stored.input_items(), query)

        return await large_response(
            listed, num_bytes // CHARS_PER_VALUE, call.request_id, call.charge
        )

    async def cancel(self, call: Call) -> web.Response:
        self._stored(call)
        raise RequestError("a response that is not in the background cannot be cancelled")

    async def _answer(
        self, call: Call, asked: ResponseCall, run: ChatRun, conversation: _Conversation
    ) -> web.StreamResponse:
        history, head = conversation.history, conversation.head

        def keep(response: dict[str, Any]) -> None:
            if head["store"]:
                stored = StoredResponse.of(_owner(call), response, history)
                self._store.put(head["id"], stored)

        tokenizer = call.engine.tokenizer
        begun = call.policy.continuation
        writer = ResponseWriter(
            run,
            head,
            tokenizer,
            streams=asked.stream,
            on_end=keep,
            num_sent=0 if begun is None else begun.num_events,
        )
        if asked.stream:
            if call.policy.journal is not None:
                call.policy.journal.tells_scores = asked.params.logprobs is not None
            events = event_stream(self._context, call)
            return await write_stream(run, writer, events)
        await write_whole(run, writer)
        return json_response(writer.response(), call.request_id)

    async def _begin(
        self, call: Call, asked: ResponseCall, params: SamplingParams | None = None
    ) -> tuple[_Conversation, ChatRun]:
        """Returns the conversation and its run, whose prompt is accepted; use that in a `with`
        block. params: instead of the call's. Very long conversations take turns: threads that work
        on one hold the interpreter for milliseconds, and the event loop would wait for several."""
        owner = _owner(call)
        previous = self._previous(asked.previous_id, owner)
        referred = self._referred(asked.items, owner)
        num_bytes = sum(stored.size_bytes for stored in referred)
        num_bytes += 0 if previous is None else previous.continued_bytes
        own_bytes = call.request.content_length
        if own_bytes is None:  # it came in chunks, and is charged if it is large
            own_bytes = call.charge.num_bytes
        size = num_bytes + own_bytes
        call.charge.add(STORED_BYTES * num_bytes, "previous_response_id")
        # a call that may wait for its grammar would keep the turn meanwhile
        takes_turn = size > TURN_BYTES and asked.params.structured is None and not asked.functions
        gather = partial(self._gathered, call, asked, previous, referred)
        async with self._turn if takes_turn else nullcontext():
            if size > self._context.settings.parse_inline_bytes:
                # one thread for all, which works on after its client has left
                conversation = await self._context.bodies.run_in_thread(gather)
            else:
                conversation = gather()
            chat = conversation.chat
            run = ChatRun(call, chat if params is None else replace(chat, params=params))
            with ExitStack() as undo:
                undo.push(run)
                await run.accepted()
                undo.pop_all()
            return conversation, run

    def _gathered(
        self,
        call: Call,
        asked: ResponseCall,
        previous: StoredResponse | None,
        referred: list[StoredResponse],
    ) -> _Conversation:
        before = () if previous is None else previous.continued()
        earlier = [item for listed in before for item in orjson.loads(listed)]
        items = _resolved(asked.items, referred)
        if len(earlier) + len(items) > MAX_MESSAGES:
            raise RequestError(
                f"the conversation has more than {MAX_MESSAGES} items",
                param="input",
                code="array_above_max_length",
            )
        response_id = "resp_" + call.answer_id.removeprefix("req_")
        head = response_head(asked, response_id, call.created, call.engine.model_name)
        chat = asked.chat(earlier, items)
        if not head["store"]:
            return _Conversation((), chat, head)
        own = json_bytes(kept_items(named_items(items, response_id)))
        return _Conversation((*before, own), chat, head)

    def _previous(self, response_id: str | None, owner: str) -> StoredResponse | None:
        """Returns the stored response that the request continues."""
        if response_id is None:
            return None
        stored = self._store.get(response_id, owner)
        if stored is None:
            raise RequestError(
                f"previous_response_id {quoted(response_id)} is not a stored response",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored

    def _referred(self, items: list[dict[str, Any]], owner: str) -> list[StoredResponse]:
        """Returns the stored responses that have the items that `items` refer to, each once."""
        found: dict[int, StoredResponse] = {}
        names: set[str] = set()
        for position, item in enumerate(items):
            if item["type"] != REFERENCE:
                continue
            where, name = f"input[{position}].id", item["id"]
            stored = self._store.of_item(name, owner)
            if stored is None:
                raise RequestError(f"{where} {quoted(name)} is not a stored item", param=where)
            if name in names:  # repeated references would turn a few bytes into many megabytes
                raise RequestError(f"{where} {quoted(name)} appears twice", param=where)
            names.add(name)
            found[id(stored)] = stored
        return list(found.values())

    def _stored(self, call: Call) -> StoredResponse:
        self._context.check_ready()
        stored = self._store.get(call.argument, _owner(call))
        if stored is None:
            raise _not_found(call.argument)
        return stored


def _resolved(items: list[dict[str, Any]], referred: list[StoredResponse]) -> list[dict[str, Any]]:
    """Returns the items with references replaced by the items that they name."""
    kept = {item["id"]: item for stored in referred for item in stored.output()}
    return [kept[item["id"]] if item["type"] == REFERENCE else item for item in items]


def _owner(call: Call) -> str:
    """Returns the owner of a call's responses. All calls without a key are one owner."""
    return "" if call.key is None else call.key.name


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"the response {quoted(response_id)} does not exist",
        param="response_id",
        code="response_not_found",
    )
