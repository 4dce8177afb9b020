"""mergestep's public names, imported when they are first used.

Importing `serve` alone is cheap: torch comes with the engine, not with the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.config import EngineConfig
    from serve.engine import Engine, RequestStream
    from serve.llm import LLM
    from serve.request import (
        CompletionOutput,
        FinishReason,
        RequestOutput,
        SamplingParams,
        TokenDelta,
    )

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "serve.llm",
    "CompletionOutput": "serve.request",
    "Engine": "serve.engine",
    "EngineConfig": "serve.config",
    "FinishReason": "serve.request",
    "RequestOutput": "serve.request",
    "RequestStream": "serve.engine",
    "SamplingParams": "serve.request",
    "TokenDelta": "serve.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TokenDelta",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
