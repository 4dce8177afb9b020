"""The endpoints, a file each: a function from the context to its routes."""

from __future__ import annotations

from serve.http.context import ApiContext, Route
from serve.http.endpoints import (
    chat,
    completions,
    embeddings,
    health,
    messages,
    models,
    openapi,
    page,
    responses,
    tokenize,
)

ENDPOINTS = (
    health.routes,
    models.routes,
    completions.routes,
    chat.routes,
    responses.routes,
    messages.routes,
    embeddings.routes,
    tokenize.routes,
    page.routes,
)


def all_routes(context: ApiContext) -> list[Route]:
    found = [route for routes in ENDPOINTS for route in routes(context)]
    return [*found, *openapi.routes(context, found)]
