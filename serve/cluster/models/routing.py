"""Which model a request is for: by its body, its query, or the stored response that it names."""

from __future__ import annotations

import re
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from aiohttp import web

from serve.cluster.models.errors import unknown_model
from serve.cluster.models.model import Model
from serve.http.edge.errors import ApiError, quoted

BY_BODY = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/internal/load",
    )
)
BY_QUERY = frozenset(("/tokenizer_info", "/openapi.json"))
LIVE = "/live"
_STORED = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/input_items|/cancel)?")
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[A-Za-z0-9_-]{1,128})"')
_MAX_RESPONSES = 65_536


class Kind(Enum):
    """Where a request says which model it is for."""

    BODY = "body"
    QUERY = "query"
    STORED = "stored"
    LIVE = "live"


class Target(NamedTuple):
    """A route of the models. route: its path for counters. response_id: of a stored response."""

    kind: Kind
    route: str
    response_id: str = ""


def find_target(request: web.BaseRequest) -> Target:
    """Returns where a request names its model. Raises ApiError: models have no such route."""
    path = request.raw_path.partition("?")[0]
    allowed = "POST"
    if path in BY_BODY:
        if request.method == "POST":
            return Target(Kind.BODY, path)
    elif path in BY_QUERY or path == LIVE:
        if request.method in ("GET", "HEAD"):
            return Target(Kind.LIVE if path == LIVE else Kind.QUERY, path)
        allowed = "GET, HEAD"
    elif found := _STORED.fullmatch(path):
        methods = {None: ("GET", "HEAD", "DELETE"), "/cancel": ("POST",)}
        known = methods.get(found[2], ("GET", "HEAD"))
        if request.method in known:
            route = "/v1/responses/{response_id}" + (found[2] or "")
            return Target(Kind.STORED, route, found[1])
        allowed = ", ".join(known)
    else:
        raise ApiError(404, f"{quoted(path)} does not exist on this server", code="unknown_url")
    raise ApiError(
        405,
        f"{quoted(path)} does not take {quoted(request.method)}",
        code="method_not_allowed",
        headers={"Allow": allowed},
    )


class Router:
    """Finds models by name, and remembers which model has which stored response. Requests that name
    no model are for the first one."""

    def __init__(self, models: dict[str, Model]) -> None:
        self._models = models
        self._responses: OrderedDict[str, str] = OrderedDict()

    def by_name(self, name: object) -> Model:
        """Raises ApiError 404 for a name that is none of the models'."""
        if name is None:
            return next(iter(self._models.values()))
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            raise unknown_model(name)
        return model

    def by_query(self, request: web.BaseRequest) -> Model:
        return self.by_name(request.rel_url.query.get("model"))

    def by_response(self, response_id: str) -> Model:
        return self.by_name(self._responses.get(response_id))

    def note(self, model: Model, begin: bytes) -> None:
        """Notes a response whose answer begins so."""
        found = _RESPONSE_ID.search(begin)
        if found is None:
            return
        self._responses[found[1].decode()] = model.name
        if len(self._responses) > _MAX_RESPONSES:
            self._responses.popitem(last=False)
