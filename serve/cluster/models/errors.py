"""Errors of requests to one of several models; each names the model."""

from __future__ import annotations

from serve.http.edge.errors import SERVER_ERROR, TIMEOUT_ERROR, ApiError, overloaded, quoted


def queue_full(name: str) -> ApiError:
    return overloaded(f"too many requests wait for models, also for {name}", code="queue_full")


def too_late(name: str, seconds: float, reason: str) -> ApiError:
    return ApiError(
        504,
        f"the model {name} was not ready within {seconds:g} s: {reason}",
        kind=TIMEOUT_ERROR,
        param="model",
        code="model_wait_timeout",
        headers={"Retry-After": "5"},
    )


def model_failed(name: str, reason: str) -> ApiError:
    return ApiError(
        503,
        f"the model {name} cannot be served: {reason}",
        kind=SERVER_ERROR,
        param="model",
        code="model_failed",
        headers={"Retry-After": "2"},
    )


def unknown_model(name: object) -> ApiError:
    return ApiError(
        404, f"the model {quoted(name)} does not exist", param="model", code="model_not_found"
    )


def not_running(name: str, state: str) -> ApiError:
    is_coming = state in ("starting", "waking")
    return ApiError(
        503,
        f"the model {name} is not in memory: it is {state.replace('_', ' ')}",
        kind=SERVER_ERROR,
        param="model",
        code="model_not_ready" if is_coming else "model_asleep",
        headers={"Retry-After": "2"},
    )
