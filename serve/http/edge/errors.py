"""Error answers in OpenAI's shape, and the headers that all answers share."""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from serve.errors import (
    EngineStoppedError,
    GenerationError,
    MemoryLostError,
    OffloadLostError,
    OverloadedError,
    RankLostError,
    RequestError,
    WeightsLostError,
)

logger = logging.getLogger(__name__)

SERVER_NAME = "mergestep"
JSON_TYPE = "application/json"
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
TIMEOUT_ERROR = "timeout_error"
RATE_LIMIT_ERROR = "rate_limit_error"
MAX_QUOTED = 64
ERROR_CODE_HEADER = "x-mergestep-error-code"  # for a hop; not all APIs' bodies have the code


class ApiError(Exception):
    """An answer other than 2xx. closes: the connection ends with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.closes = closes

    def body(self) -> bytes:
        error = {
            "message": _encodable(self.message),
            "type": self.kind,
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return orjson.dumps({"error": error})


def quoted(value: object) -> str:
    """Returns a client's value for a message, short and printable."""
    text = _encodable(str(value))
    if len(text) > MAX_QUOTED:
        text = text[:MAX_QUOTED] + "..."
    return orjson.dumps(text).decode()


def retry_after(seconds: float) -> dict[str, str]:
    """Returns the header. Its random part spreads the return of clients refused together."""
    return {"Retry-After": str(max(1, math.ceil(seconds * random.uniform(1.0, 1.5))))}


def overloaded(message: str, *, code: str = "overloaded", retry_after_s: float = 1.0) -> ApiError:
    return ApiError(
        429,
        message,
        kind=RATE_LIMIT_ERROR,
        code=code,
        headers=retry_after(retry_after_s),
    )


def generation_timeout(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer was not complete within {seconds:g} s",
        kind=TIMEOUT_ERROR,
        code="generation_timeout",
    )


def engine_stuck(stall_reason: str) -> ApiError:
    return ApiError(503, stall_reason, kind=SERVER_ERROR, code="engine_stuck")


def not_ready() -> ApiError:
    return ApiError(
        503,
        "the model is still loading",
        kind=SERVER_ERROR,
        code="model_not_ready",
        headers={"Retry-After": "2"},
    )


def asleep() -> ApiError:
    return ApiError(
        503,
        "the model sleeps; POST /wake_up wakes it",
        kind=SERVER_ERROR,
        code="model_asleep",
        headers={"Retry-After": "2"},
    )


def no_memory(message: str) -> ApiError:
    return _lost(message, "memory_nodes_lost")


def rank_lost(message: str) -> ApiError:
    return _lost(message, "rank_lost")


def weights_lost(message: str) -> ApiError:
    return _lost(message, "weights_lost")


def _lost(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind=SERVER_ERROR, code=code, headers={"Retry-After": "5"})


def draining() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down",
        kind=SERVER_ERROR,
        code="draining",
        headers={"Retry-After": "5"},
    )


def engine_failed() -> ApiError:
    return ApiError(
        503,
        "the engine has failed; the server must be restarted",
        kind=SERVER_ERROR,
        code="engine_failed",
    )


def internal_error() -> ApiError:
    return ApiError(
        500,
        "the server failed to answer this request; quote the x-request-id header in a report",
        kind=SERVER_ERROR,
        code="internal_error",
    )


def to_api_error(exc: Exception, request_id: str) -> ApiError:
    """Returns the answer to an exception. Any unexpected exception is a bug of the server: it is
    logged, and the answer has no details."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, OverloadedError):
        return overloaded(str(exc), code=exc.code, retry_after_s=exc.retry_after_s)
    if isinstance(exc, EngineStoppedError):
        return draining()
    if isinstance(exc, MemoryLostError):
        return no_memory(str(exc))
    if isinstance(exc, RankLostError):
        return rank_lost(str(exc))
    if isinstance(exc, WeightsLostError):
        return weights_lost(str(exc))
    if isinstance(exc, OffloadLostError):
        return _lost(str(exc), "kv_lost")
    if isinstance(exc, GenerationError):
        logger.warning("request %s failed in the engine: %s", request_id, exc)
        return internal_error()
    logger.error("request %s failed", request_id, exc_info=exc)
    return internal_error()


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


def common_headers(request_id: str) -> dict[str, str]:
    return {
        "Server": SERVER_NAME,
        "x-request-id": request_id,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def error_response(error: ApiError, request_id: str) -> web.Response:
    response = web.Response(
        status=error.status,
        body=error.body(),
        content_type=JSON_TYPE,
        headers={**common_headers(request_id), **error.headers},
    )
    if error.closes:
        response.force_close()
    return response


def json_response(value: Any, request_id: str) -> web.Response:
    return body_response(orjson.dumps(value), request_id)


def body_response(body: bytes, request_id: str) -> web.Response:
    """body: JSON."""
    return web.Response(body=body, content_type=JSON_TYPE, headers=common_headers(request_id))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
