"""The table of endpoints. Each function takes the context and returns the routes of an endpoint."""

from __future__ import annotations

from serve.http.anthropic.endpoint import messages_routes
from serve.http.calls.context import ApiContext, Route
from serve.http.monitoring.health import health_routes
from serve.http.monitoring.load_endpoint import load_routes
from serve.http.monitoring.openapi_endpoint import openapi_routes
from serve.http.monitoring.page_endpoint import page_routes
from serve.http.monitoring.sleep_endpoint import sleep_routes
from serve.http.openai.chat_endpoint import chat_routes
from serve.http.openai.completions_endpoint import completion_routes
from serve.http.openai.embeddings_endpoint import embedding_routes
from serve.http.openai.models_endpoint import model_routes
from serve.http.openai.tokenize_endpoint import tokenize_routes
from serve.http.responses.endpoint import response_routes

ENDPOINTS = (
    health_routes,
    model_routes,
    completion_routes,
    chat_routes,
    response_routes,
    messages_routes,
    embedding_routes,
    tokenize_routes,
    load_routes,
    page_routes,
    sleep_routes,
)


def all_routes(context: ApiContext) -> list[Route]:
    routes = [route for endpoint in ENDPOINTS for route in endpoint(context)]
    return [*routes, *openapi_routes(context, routes)]
