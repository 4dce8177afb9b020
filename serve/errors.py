"""The exception tree. Everything a caller may want to catch is here.

MergestepError
├── ConfigError            a setting that cannot work; names the setting
├── ModelLoadError         a checkpoint that cannot be served; names file, tensor or key
├── RequestError           the caller's mistake in one request; names the parameter
│   └── ContextLengthError the prompt (plus max_tokens) does not fit the context
├── OverloadedError        too much waits already; try again later
├── EngineStoppedError     the engine is shutting down or has shut down
└── GenerationError        the engine failed while serving this request
    └── MemoryLostError    memory nodes are lost, and no other memory is there; try again later
"""

from __future__ import annotations

import os


class MergestepError(Exception):
    """Base of all errors raised by mergestep on purpose."""


class ConfigError(MergestepError):
    """A setting that cannot work. The message names the setting and what to change."""


class ModelLoadError(MergestepError):
    """A checkpoint that cannot be served. The message names the file, tensor or key."""


class RequestError(MergestepError):
    """The caller's mistake. `param` names the field, `code` is OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus max_tokens, does not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(MergestepError):
    """Too much waits already. `retry_after_s` is a hint in seconds. `code`: "queue_full", or
    "overloaded" where the first token would come too late."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str = "queue_full"):
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class EngineStoppedError(MergestepError):
    """The engine is shutting down or has shut down; nothing new is accepted."""


class GenerationError(MergestepError):
    """The engine failed while serving this request; other requests go on."""


class MemoryLostError(GenerationError):
    """Memory nodes are lost, and what is left has no room for the request; try again later."""


def plain(error: Exception) -> str:
    """What to show a person: the words of an error of the system, without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def reason(error: OSError) -> str:
    """The system's words for its number; an event loop adds addresses in Python's notation."""
    untrusted = getattr(error, "verify_message", None)  # TLS: its errno is not the system's
    if untrusted:
        return f"its certificate is not trusted: {untrusted}"
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)
