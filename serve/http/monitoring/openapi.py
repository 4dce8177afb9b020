"""Makes the server's OpenAPI 3.1 document from the descriptions of its routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from serve import __version__
from serve.http.calls.context import Route
from serve.http.schema.describe import ERROR, Operation
from serve.http.schema.fields import Schema, nullable

MEANINGS = {
    200: "The answer.",
    304: "The client's copy is current.",
    400: "The request is invalid; `param` names the field.",
    401: "A valid API key is needed.",
    403: "The API key does not allow this.",
    404: "The path, model or object does not exist.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or it is compressed.",
    417: "The only supported Expect header is 100-continue.",
    429: "Too many requests; Retry-After says when to retry.",
    431: "The request's head is too large.",
    500: "The server failed; its log has the request id.",
    503: "Loading, stopping or without memory; Retry-After says when to retry.",
    504: "The answer was not complete in time.",
    529: "Overloaded, in Anthropic's API; Retry-After says when to retry.",
}
EVERYWHERE = (400, 431, 500, 503)
WITH_KEY = (401, 403, 429)
WITH_BODY = (404, 408, 413, 415, 417, 504)
_HEADERS = {
    "x-request-id": {
        "description": "The server makes it, and its log has it.",
        "required": True,
        "schema": {"type": "string"},
    }
}


def document(routes: Iterable[Route], model: str) -> dict[str, Any]:
    """Returns the document. model: the served model's name."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mergestep",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs over one model on this machine.",
        },
        "paths": {route.path: _path(route, model) for route in routes},
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
    }


def _path(route: Route, model: str) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    path: dict[str, Any] = {
        method.lower(): _operation(route, method, model, bool(names)) for method in route.handlers
    }
    if names:
        path["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            for name in names
        ]
    return path


def _operation(route: Route, method: str, model: str, has_argument: bool) -> dict[str, Any]:
    described = route.describe.get(method) or Operation(f"{method} {route.path}")
    statuses = {*EVERYWHERE, *described.statuses}
    if not route.is_public:
        statuses.update(WITH_KEY)
    if described.body is not None:
        statuses.update(WITH_BODY)
    if has_argument:
        statuses.add(404)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_"),
        "summary": described.summary,
        "responses": {"200": _answer(described)}
        | {str(status): _error(status, described.error or ERROR) for status in sorted(statuses)},
        "security": [] if route.is_public else [{}, {"bearer": []}, {"x-api-key": []}],
    }
    if described.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in described.query.items()
        ]
    if described.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _naming(described.body, model)}},
        }
    return operation


def _naming(body: Schema, model: str) -> Schema:
    """Returns a body's schema in which `model` must be the served name."""
    if "anyOf" in body:
        return {**body, "anyOf": [_naming(form, model) for form in body["anyOf"]]}
    properties = body.get("properties", {})
    if "model" not in properties:
        return body
    named: Schema = {"type": "string", "enum": [model]}
    given = named if "model" in body.get("required", ()) else nullable(named)
    return {**body, "properties": {**properties, "model": given}}


def _answer(described: Operation) -> dict[str, Any]:
    text: Schema = {"type": "string"}
    content = {
        described.answer_type: {"schema": text if described.answer is None else described.answer}
    }
    if described.streams:
        content["text/event-stream"] = {"schema": text}
    return {"description": MEANINGS[200], "content": content, "headers": _HEADERS}


def _error(status: int, schema: Schema) -> dict[str, Any]:
    if status == 304:
        return {"description": MEANINGS[304], "headers": _HEADERS}
    return {
        "description": MEANINGS.get(status, "An error."),
        "content": {"application/json": {"schema": schema}},
        "headers": _HEADERS,
    }
