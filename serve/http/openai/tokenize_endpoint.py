"""POST /tokenize and /detokenize and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from serve.chat.request import ChatRequest
from serve.errors import RequestError
from serve.http.calls.chat_run import ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.conversation import CONVERSATION_FIELDS, conversation
from serve.http.edge.errors import body_response, json_response
from serve.http.edge.large_json import (
    INLINE_VALUES,
    SENT_PIECE,
    StreamedJson,
    list_pieces,
    text_pieces,
)
from serve.http.edge.memory_budget import DECODE_BYTES, TOKEN_BYTES
from serve.http.openai.answer_schemas import DETOKENIZE_ANSWER, TOKENIZE_ANSWER, TOKENIZER_ANSWER
from serve.http.openai.prompts import charge_encoding
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

if TYPE_CHECKING:
    from serve.engine.engine import Engine

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
    async def tokenize(call: Call) -> web.StreamResponse:
        asked = await context.read(call, parse_tokenize)
        tokens = await _tokens(call, asked)
        pieces = _tokenize_pieces(call.engine, tokens, with_strings=asked.return_strings)
        return _answer(pieces, len(tokens), call.request_id)

    async def detokenize(call: Call) -> web.StreamResponse:
        tokens = (await context.read(call, parse_detokenize)).tokens
        size = call.engine.spec.vocab_size
        if max(tokens, default=0) >= size:
            raise RequestError(f"tokens has a token id above {size - 1}", param="tokens")
        tokenizer, charge = call.engine.tokenizer, call.charge

        def decode() -> str:
            return tokenizer.decode(tokens, skip_special_tokens=False)

        if len(tokens) <= INLINE_VALUES:
            return json_response({"prompt": decode()}, call.request_id)
        needed = DECODE_BYTES * len(tokens)
        charge.add(needed, "tokens")
        text = await charge.run(decode)
        charge.reduce(max(0, needed - sys.getsizeof(text)))
        return _answer(_detokenize_pieces(text), len(text), call.request_id)

    async def info(call: Call) -> web.Response:
        context.check_ready()
        tokenizer = call.engine.tokenizer
        answer = {
            **dict.fromkeys(("bos_token", "eos_token", "pad_token")),
            **tokenizer.named_tokens,
            "chat_template": tokenizer.chat_template,
            "model_max_length": call.engine.max_model_len,
        }
        return json_response(answer, call.request_id)

    body = {"anyOf": [TEXT.schema(), CHAT.schema()]}
    tokens = Operation("Token ids of a text or of a conversation", TOKENIZE_ANSWER, body)
    text = Operation("The text of token ids", DETOKENIZE_ANSWER, TOKENS.schema())
    about = Operation("The special tokens and the chat template", TOKENIZER_ANSWER)
    return [
        Route("/tokenize", {"POST": tokenize}, describe={"POST": tokens}),
        Route("/detokenize", {"POST": detokenize}, describe={"POST": text}),
        Route("/tokenizer_info", {"GET": info}, describe={"GET": about}),
    ]


async def _tokens(call: Call, asked: TokenizeCall) -> Sequence[int]:
    if asked.chat is not None:
        with ChatRun(call, asked.chat) as run:
            await run.accepted()
            rendered = run.generation.requests[0].prompt_token_ids
        call.charge.add(TOKEN_BYTES * len(rendered), "messages")
        return rendered
    tokenizer, charge, text = call.engine.tokenizer, call.charge, asked.text

    def encode() -> list[int]:
        return tokenizer.encode(text, add_special_tokens=asked.add_special_tokens)

    if len(text) * tokenizer.max_growth <= INLINE_CHARS:
        return encode()
    needed = await charge_encoding(text, tokenizer, charge, "prompt")
    tokens = await charge.run(lambda: _packed(encode()))
    charge.reduce(max(0, needed - TOKEN_BYTES * len(tokens)))
    return tokens


def _packed(tokens: list[int]) -> array[int]:
    """Returns an array, since the integers of a list take ten times as much. The list is freed in
    pieces: all at once would hold the interpreter for too long."""
    packed = array("i")
    while tokens:
        packed.extend(tokens[:SENT_PIECE])
        del tokens[:SENT_PIECE]
    return packed


def _answer(pieces: Iterator[bytes], num_values: int, request_id: str) -> web.StreamResponse:
    if num_values > INLINE_VALUES:
        return StreamedJson(pieces, request_id)
    return body_response(b"".join(pieces), request_id)


def _tokenize_pieces(
    engine: Engine, tokens: Sequence[int], *, with_strings: bool
) -> Iterator[bytes]:
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(tokens), engine.max_model_len)
    yield from list_pieces(tokens)
    yield b',"token_strs":'
    if with_strings:
        yield from list_pieces(map(engine.tokenizer.token_text, tokens))
    else:
        yield b"null"
    yield b"}"


def _detokenize_pieces(text: str) -> Iterator[bytes]:
    yield b'{"prompt":'
    yield from text_pieces(text)
    yield b"}"
