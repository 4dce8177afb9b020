"""GET /openapi.json and GET /version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from aiohttp import web

from serve import __version__
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.edge.errors import json_response
from serve.http.monitoring.openapi import document
from serve.http.openai.answer_schemas import VERSION_ANSWER
from serve.http.schema.describe import Operation


def openapi_routes(context: ApiContext, others: Sequence[Route]) -> list[Route]:
    """Returns the routes. others: the routes that /openapi.json describes beside these."""

    @cache
    def described() -> dict[str, object]:
        return document([*others, *own], context.engine.model_name)

    async def openapi(call: Call) -> web.Response:
        return json_response(described(), call.request_id)

    async def version(call: Call) -> web.Response:
        return json_response({"version": __version__}, call.request_id)

    own = [
        Route(
            "/openapi.json",
            {"GET": openapi},
            describe={"GET": Operation("This description", {"type": "object"})},
        ),
        Route(
            "/version",
            {"GET": version},
            describe={"GET": Operation("The server's version", VERSION_ANSWER)},
        ),
    ]
    return own
