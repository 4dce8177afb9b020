"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiohttp import web

from serve.errors import RequestError
from serve.http.calls.chat_run import ChatRequest, ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.conversation import CONVERSATION_FIELDS, conversation
from serve.http.edge.large_json import large_response
from serve.http.openai.answer_schemas import DETOKENIZE_ANSWER, TOKENIZE_ANSWER
from serve.http.schema.describe import Operation
from serve.http.schema.fields import (
    Boolean,
    FieldType,
    Record,
    String,
    TokenIds,
    Unknown,
    Unsupported,
)
from serve.sampling_params import SamplingParams

MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 18
INLINE_CHARS = 4096  # longer texts are tokenized in a thread

_COMMON: dict[str, FieldType] = {
    "model": String(512, min_chars=1),
    "return_token_strs": Boolean(),
}
TEXT = Record(
    {
        **_COMMON,
        "prompt": String(MAX_TEXT_CHARS, is_text=True),
        "add_special_tokens": Boolean(),
        "add_generation_prompt": Boolean(),
    },
    required=("prompt",),
)
CHAT = Record(
    {
        **CONVERSATION_FIELDS,
        **_COMMON,
        "add_special_tokens": Unsupported((False,)),
        "chat_template": Unsupported(),
    },
    required=("messages",),
)
TOKENS = Record(
    {"model": String(512, min_chars=1), "tokens": TokenIds(MAX_TOKENS)}, required=("tokens",)
)


class TokenizeCall(NamedTuple):
    """A checked body of POST /tokenize: a text, or a conversation."""

    model: str | None
    text: str
    chat: ChatRequest | None
    add_special_tokens: bool
    return_strings: bool


class DetokenizeCall(NamedTuple):
    model: str | None
    tokens: list[int]


def parse_tokenize(body: Mapping[str, Any], unknown: Unknown) -> TokenizeCall:
    if body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise RequestError("prompt and messages cannot both be given", param="prompt")
        values = CHAT.check(body, "", unknown)
        # max_tokens 0: the chat is rendered and tokenized, but never scheduled
        chat = conversation(values, SamplingParams(max_tokens=0), None)
        text = ""
    else:
        values, chat = TEXT.check(body, "", unknown), None
        text = values["prompt"]
    return TokenizeCall(
        values.get("model"),
        text,
        chat,
        values.get("add_special_tokens", True),
        values.get("return_token_strs", False),
    )


def parse_detokenize(body: Mapping[str, Any], unknown: Unknown) -> DetokenizeCall:
    values = TOKENS.check(body, "", unknown)
    return DetokenizeCall(values.get("model"), values["tokens"])


def tokenize_routes(context: ApiContext) -> list[Route]:
    async def tokenize(call: Call) -> web.Response:
        asked = await context.read(call, parse_tokenize)
        tokens = await _tokens(call, asked)
        engine = call.engine

        def strings() -> list[str] | None:
            if not asked.return_strings:
                return None
            return [engine.tokenizer.token_text(token) for token in tokens]

        def answer() -> dict[str, Any]:
            return {
                "count": len(tokens),
                "max_model_len": engine.max_model_len,
                "tokens": tokens,
                "token_strs": strings(),
            }

        return await large_response(answer, len(tokens), call.request_id)

    async def detokenize(call: Call) -> web.Response:
        tokens = (await context.read(call, parse_detokenize)).tokens
        size = call.engine.spec.vocab_size
        if any(token >= size for token in tokens):
            raise RequestError(f"tokens has a token id above {size - 1}", param="tokens")

        def answer() -> dict[str, Any]:
            return {"prompt": call.engine.tokenizer.decode(tokens, skip_special_tokens=False)}

        return await large_response(answer, len(tokens), call.request_id)

    body = {"anyOf": [TEXT.schema(), CHAT.schema()]}
    tokens = Operation("Token ids of a text or of a conversation", TOKENIZE_ANSWER, body)
    text = Operation("The text of token ids", DETOKENIZE_ANSWER, TOKENS.schema())
    return [
        Route("/tokenize", {"POST": tokenize}, describe={"POST": tokens}),
        Route("/detokenize", {"POST": detokenize}, describe={"POST": text}),
    ]


async def _tokens(call: Call, asked: TokenizeCall) -> list[int]:
    if asked.chat is not None:
        with ChatRun(call, asked.chat) as run:
            await run.accepted()
            return list(run.generation.requests[0].prompt_token_ids)
    tokenizer = call.engine.tokenizer

    def encode() -> list[int]:
        return tokenizer.encode(asked.text, add_special_tokens=asked.add_special_tokens)

    return encode() if len(asked.text) <= INLINE_CHARS else await asyncio.to_thread(encode)
