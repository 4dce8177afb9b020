"""The context that all endpoints share: the engine, the server's state, a call, a route."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiohttp import web

from serve import __version__
from serve.http.calls.continuation import (
    JOURNAL_HEADER,
    Continuation,
    Journal,
    take_continuation,
)
from serve.http.calls.key_policy import KeyPolicy
from serve.http.edge.body import Bodies, read_call
from serve.http.edge.counters import HttpCounters
from serve.http.edge.errors import (
    MAX_QUOTED,
    ApiError,
    asleep,
    draining,
    engine_failed,
    error_response,
    not_ready,
    quoted,
)
from serve.http.edge.keys import ApiKey
from serve.http.edge.memory_budget import Charge, MemoryBudget
from serve.http.edge.settings import HttpSettings
from serve.http.schema.describe import Operation
from serve.http.schema.fields import MAX_LISTED, Unknown
from serve.kept import Kept, size_of

if TYPE_CHECKING:
    from serve.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_LOGGED_NAMES = 256


class ParsedBody(Protocol):
    """The result of parsing a body."""

    @property
    def model(self) -> str | None:
        """The model that the body names; None is the served one."""


T = TypeVar("T", bound=ParsedBody)


class ServerState(Enum):
    """The state of the server, which answers API calls only when it is READY."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"


@dataclass(slots=True)
class Call:
    """One HTTP request.

    policy: what the call's key allows; every request that goes to the engine carries it. charge:
    the memory that the call is expected to take; it is released at the call's end.
    argument: the part of the path that stands for `{...}` in the route's path. headers: headers of
    the answer, beside the common ones. answer_id: what the answer's id is made of; another server
    that goes on with it has the same. created: when the call arrived, in Unix seconds. arrived_s:
    when the head had arrived, in seconds of the
    monotonic clock. error_code: the code of the error that answered the call.
    """

    request: web.BaseRequest
    request_id: str
    engine: Engine
    policy: KeyPolicy
    charge: Charge
    argument: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    arrived_s: float = field(default_factory=time.monotonic)
    answer_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    route: Route | None = None
    response: web.StreamResponse | None = None
    error_code: str | None = None

    def __post_init__(self) -> None:
        self.answer_id = self.answer_id or self.request_id

    @property
    def key(self) -> ApiKey | None:
        """The key that the call has shown; None where the server asks for none."""
        return self.policy.key


Handler = Callable[[Call], Awaitable[web.StreamResponse]]
ErrorShape = Callable[[ApiError, str], web.Response]


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the server.

    path: as on the wire; one `{...}` in it stands for any text that is not empty. handlers: by
    method. is_public: it needs no key. is_endless: its answer ends when the reader leaves.
    error_shape: makes the answer from (error, request id) in the shape of the route's API.
    describe: by method, for /openapi.json.
    """

    path: str
    handlers: Mapping[str, Handler]
    is_public: bool = False
    is_endless: bool = False
    error_shape: ErrorShape = error_response
    describe: Mapping[str, Operation] = field(default_factory=dict)


@dataclass(slots=True)
class ApiContext:
    """The state of one server. calls: those that are being answered. bodies: those that are being
    read. logged_names: unknown parameters that have been logged, cut as in the log. kept: functions
    that return what a part keeps between requests, by its name; any thread may call them."""

    engine: Engine
    settings: HttpSettings
    state: ServerState = ServerState.LOADING
    created: int = field(default_factory=lambda: int(time.time()))
    counters: HttpCounters = field(default_factory=HttpCounters)
    calls: set[KeyPolicy] = field(default_factory=set)
    bodies: Bodies = field(default_factory=Bodies)
    logged_names: set[str] = field(default_factory=set)
    kept: dict[str, Callable[[], Kept]] = field(default_factory=dict)
    _fingerprint: str = ""
    budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = MemoryBudget(self.settings.max_work_bytes)
        self.kept["log_texts"] = lambda: size_of(self.logged_names)
        self.kept["metric_labels"] = self.counters.kept

    @property
    def fingerprint(self) -> str:
        """A digest of model, version, precision and K/V policy. Where it differs, answers to the
        same seed may differ."""
        if not self._fingerprint:
            config = self.engine.config
            parts: tuple[str, ...] = (
                self.engine.model_name,
                __version__,
                config.dtype,
                config.kv_dtype,
            )
            if config.policy is not None:  # it decides what tokens attend to
                parts += (config.kv_policy,)
            self._fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        return self._fingerprint

    async def read(self, call: Call, parse: Callable[[dict[str, Any], Unknown], T]) -> T:
        """Returns what `parse` makes of the call's JSON object. Unknown parameters are refused, or
        listed in a header of the answer, as is what is left out. Raises ApiError or RequestError
        for a body that is not valid, for another model, and while the server cannot answer."""
        self.check_ready()
        unknown = Unknown(refuse=self.settings.unknown_fields == "refuse")
        continuation, value = await read_call(
            call.request,
            self.settings,
            self.bodies,
            lambda body: (take_continuation(body), parse(body, unknown)),
            call.charge,
        )
        self._begin_journal(call, continuation)
        warnings = []  # the header must be ASCII and short
        if unknown.names:
            names = [json.dumps(name[:MAX_QUOTED]) for name in unknown.names[:MAX_LISTED]]
            warnings.append(f"unknown parameters: {', '.join(names)}")
            self._log_once("a request has the unknown parameter %s", unknown.names)
        if unknown.left_out:
            warnings.append(f"left out: {', '.join(unknown.left_out[:MAX_LISTED])}")
            self._log_once("a request is answered without %s", unknown.left_out)
        if warnings:
            call.headers["x-mergestep-warning"] = "; ".join(warnings)
        if value.model is not None:
            self.check_model(value.model)
        self.check_ready()  # again, since a body may take long to arrive
        return value

    def _begin_journal(self, call: Call, continuation: Continuation | None) -> None:
        is_asked = JOURNAL_HEADER in call.request.headers
        if continuation is not None:
            call.answer_id, call.created = continuation.state.answer_id, continuation.state.created
        elif not is_asked:
            return
        call.policy.continuation = continuation
        call.policy.journal = Journal(
            call.answer_id,
            call.created,
            self.fingerprint,
            has_comments=is_asked,
            copied=self.engine.copied if self.engine.config.kv_listen is not None else None,
        )

    def _log_once(self, text: str, names: list[str]) -> None:
        """Logs each name once, up to MAX_LOGGED_NAMES names."""
        for name in (name[: MAX_QUOTED + 1] for name in names):  # not megabytes for ever
            if name not in self.logged_names and len(self.logged_names) < MAX_LOGGED_NAMES:
                self.logged_names.add(name)
                logger.warning(text, quoted(name))

    def check_ready(self) -> None:
        """Raises ApiError 503 unless requests can be answered."""
        if self.state is ServerState.LOADING:
            raise not_ready()
        if self.state is ServerState.DRAINING:
            raise draining()
        if self.state is ServerState.ASLEEP:
            raise asleep()
        if not self.engine.is_ready:
            raise engine_failed()

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for any other name than that of the served model."""
        if name != self.engine.model_name:
            raise ApiError(
                404,
                f"the model {quoted(name)} does not exist",
                param="model",
                code="model_not_found",
            )
