"""The exception tree: every error that a caller may want to catch.

MergestepError
├── ConfigError            a setting does not work; the message names it
├── ModelLoadError         a checkpoint cannot be served; names the file, tensor or key
│   └── DownloadError      a model cannot be fetched from the hub; says what to do
├── RequestError           a request is wrong; names the parameter
│   └── ContextLengthError the prompt (plus max_tokens) does not fit the context
├── OverloadedError        too many requests wait; try again later
├── EngineStoppedError     the engine is shutting down or has shut down
└── GenerationError        the engine failed while serving this request
    ├── MemoryLostError    memory nodes are lost and no other memory is left; try again later
    ├── WeightsLostError   weights cannot be read from the disk
    ├── OffloadLostError   K/V cannot be read from the disk
    └── RankLostError      a rank of the model is lost and was not replaced in time; try again later
"""

from __future__ import annotations

import os

WEIGHTS_LOST = "weights cannot be read from the disk; try again later"
KV_LOST = "K/V cannot be read from the disk; try again later"
GROUP_LOST = "a rank of the model is lost; try again later"


class MergestepError(Exception):
    """The base of all errors that mergestep raises on purpose."""


class ConfigError(MergestepError):
    """A setting does not work. The message names the setting and what to change."""


class ModelLoadError(MergestepError):
    """A checkpoint cannot be served. The message names the file, tensor or key."""


class DownloadError(ModelLoadError):
    """A model cannot be fetched from the hub. The message says what to do.

    `code` is one of not_found, revision, gated, token, forbidden, rate_limited, network, server,
    damaged, disk, offline, choice and refused.
    """

    def __init__(self, message: str, *, code: str):
        super().__init__(message)
        self.code = code


class RequestError(MergestepError):
    """A request is wrong. `param` names the field; `code` is OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus max_tokens, does not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(MergestepError):
    """Too many requests wait. `retry_after_s` is a hint in seconds. `code` is "queue_full", or
    "overloaded" where the first token would come later than `ttft_slo`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str = "queue_full"):
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class EngineStoppedError(MergestepError):
    """The engine is shutting down or has shut down and accepts no request."""


class GenerationError(MergestepError):
    """The engine failed while serving this request; other requests go on."""


class MemoryLostError(GenerationError):
    """Memory nodes are lost, and the rest has no room for the request; try again later."""


class WeightsLostError(GenerationError):
    """Weights that are not in memory cannot be read from the disk, or have changed there."""


class OffloadLostError(GenerationError):
    """K/V of the request that is not in memory cannot be read from the disk."""


class RankLostError(GenerationError):
    """A rank of the model is lost, and no other took its place in time; try again later."""


def message_of(error: Exception) -> str:
    """Returns the text to show to a user; a system error is shown without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def drop_frames(error: BaseException) -> None:
    """Drops the stack frames to which an error, its cause and its context refer.

    A frame that holds the error in a variable is a cycle with it. Until the next garbage
    collection, which may be thousands of requests away, such a cycle keeps all that the frames
    hold: a refused request's whole body, several times.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            waiting += (each.__cause__, each.__context__)


def reason(error: OSError) -> str:
    """Returns the system's text for the error number.

    The text of `error` itself is not used because asyncio adds addresses in Python's notation.
    """
    untrusted = getattr(error, "verify_message", None)  # the errno of a TLS error is OpenSSL's
    if untrusted:
        return f"its certificate is not trusted: {untrusted}"
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)
