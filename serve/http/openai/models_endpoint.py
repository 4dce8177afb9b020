"""/v1/models: the one model that is served."""

from __future__ import annotations

from aiohttp import web

from serve.http.calls.context import ApiContext, Call, Route
from serve.http.edge.errors import json_response
from serve.http.openai import shapes
from serve.http.openai.answer_schemas import MODEL_ANSWER, MODELS_ANSWER
from serve.http.schema.describe import Operation


def model_routes(context: ApiContext) -> list[Route]:
    def model_object() -> dict[str, object]:
        engine = context.engine
        return shapes.model_object(
            engine.model_name, context.created, engine.max_model_len, engine.spec.vocab_size
        )

    async def listing(call: Call) -> web.Response:
        context.check_ready()
        return json_response({"object": "list", "data": [model_object()]}, call.request_id)

    async def one(call: Call) -> web.Response:
        context.check_ready()
        context.check_model(call.argument)
        return json_response(model_object(), call.request_id)

    every = Operation("The models that are served", MODELS_ANSWER)
    single = Operation("One model", MODEL_ANSWER)
    return [
        Route("/v1/models", {"GET": listing}, describe={"GET": every}),
        Route("/v1/models/{id}", {"GET": one}, describe={"GET": single}),
    ]
