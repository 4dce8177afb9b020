"""POST /v1/embeddings: vectors of texts, pooled from the model's final hidden states."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from serve.engine.outputs import EmbeddingOutput, embedding_output
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.generation import checked, submit_each
from serve.http.calls.sampling_fields import (
    CLIENT_FIELDS,
    IGNORED_FIELDS,
    MAX_TOKENS,
    MODEL,
    SAMPLING_FIELDS,
    client_name,
)
from serve.http.edge.errors import body_response
from serve.http.edge.large_json import StreamedJson
from serve.http.edge.memory_budget import EMBEDDING_BYTES
from serve.http.openai.answer_schemas import EMBEDDINGS_ANSWER
from serve.http.openai.prompts import cut_long_texts, prompts_field, with_options
from serve.http.schema.describe import Operation
from serve.http.schema.fields import Boolean, Integer, OneOfNames, Record, Unknown
from serve.parameter_checks import parameters_named
from serve.pooling import MAX_DIMENSIONS, POOLING_KINDS, PoolingParams
from serve.request import Prompt

if TYPE_CHECKING:
    from serve.engine.request_stream import RequestStream

MAX_INPUTS = 2048
INLINE_NUMBERS = 1 << 14  # more are serialized to JSON in a thread

EMBEDDINGS = Record(
    {
        "model": MODEL,
        "input": prompts_field(MAX_INPUTS),
        "encoding_format": OneOfNames(("float", "base64")),
        "dimensions": Integer(1, MAX_DIMENSIONS),
        "pooling": OneOfNames(POOLING_KINDS),
        "normalize": Boolean(),
        "add_special_tokens": Boolean(),
        "truncate_prompt_tokens": Integer(1, MAX_TOKENS),
        "truncation_side": OneOfNames(("left", "right")),
        "cache_salt": SAMPLING_FIELDS["cache_salt"],
        "priority": SAMPLING_FIELDS["priority"],
        **CLIENT_FIELDS,
        **IGNORED_FIELDS,
    },
    required=("model", "input"),
)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A checked body of POST /v1/embeddings."""

    model: str
    prompts: list[Prompt]
    params: PoolingParams
    is_base64: bool
    client: str | None


def parse_embeddings(body: Mapping[str, Any], unknown: Unknown) -> EmbeddingCall:
    values = EMBEDDINGS.check(body, "", unknown)
    names = ("normalize", "dimensions", "cache_salt", "priority")
    params = PoolingParams(
        kind=values.get("pooling", "mean"),
        **{name: values[name] for name in names if name in values},
    )
    return EmbeddingCall(
        values["model"],
        [with_options(prompt, values) for prompt in values["input"]],
        params,
        values.get("encoding_format") == "base64",
        client_name(values),
    )


def embedding_routes(context: ApiContext) -> list[Route]:
    async def embeddings(call: Call) -> web.StreamResponse:
        asked = await context.read(call, parse_embeddings)
        dimensions = asked.params.dimensions or call.engine.spec.hidden_size
        call.charge.add(EMBEDDING_BYTES * dimensions * len(asked.prompts), "input")
        with parameters_named({"prompt": "input"}):
            outputs = await _embed(call, asked)
        pieces = _pieces(outputs, asked.model, is_base64=asked.is_base64)
        if sum(len(output.embedding) for output in outputs) > INLINE_NUMBERS:
            return StreamedJson(pieces, call.request_id)
        return body_response(b"".join(pieces), call.request_id)

    described = Operation("Vectors of texts", EMBEDDINGS_ANSWER, EMBEDDINGS.schema())
    return [Route("/v1/embeddings", {"POST": embeddings}, describe={"POST": described})]


async def _embed(call: Call, asked: EmbeddingCall) -> list[EmbeddingOutput]:
    """Returns the embeddings of all prompts. An error aborts all of them."""

    def submit(prompt: Prompt, name: str) -> RequestStream:
        return call.engine.submit_embedding(
            prompt, asked.params, request_id=name, client=asked.client, policy=call.policy
        )

    prompts = await cut_long_texts(asked.prompts, call.engine.tokenizer, call.charge, "input")
    streams = await submit_each(prompts, call.request_id, submit)
    try:
        for stream in streams:
            await stream.accepted()
        return [await _output(stream) for stream in streams]
    finally:
        for stream in streams:
            stream.abort()


async def _output(stream: RequestStream) -> EmbeddingOutput:
    last = None
    async for delta in stream:
        last = checked(delta)
    return embedding_output(await stream.accepted(), last, stream.metrics)


def _pieces(outputs: list[EmbeddingOutput], model: str, *, is_base64: bool) -> Iterator[bytes]:
    """Yields the answer, with vectors as JSON numbers or as base64 of little-endian fp32."""
    yield b'{"object":"list","model":' + orjson.dumps(model) + b',"data":['
    for index, output in enumerate(outputs):
        vector = output.embedding
        item = {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if is_base64
            else vector,
        }
        yield (b"," if index else b"") + orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    yield b'],"usage":' + orjson.dumps(usage) + b"}"
