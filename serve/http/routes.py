"""The endpoints, a file each: a function from the context to its routes."""

from __future__ import annotations

from serve.http.anthropic import endpoint as messages
from serve.http.calls.context import ApiContext, Route
from serve.http.monitoring import health
from serve.http.monitoring import openapi_endpoint as openapi
from serve.http.monitoring import page_endpoint as page
from serve.http.openai import chat_endpoint as chat
from serve.http.openai import completions_endpoint as completions
from serve.http.openai import embeddings_endpoint as embeddings
from serve.http.openai import models_endpoint as models
from serve.http.openai import tokenize_endpoint as tokenize
from serve.http.responses import endpoint as responses

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
