"""mergestep's public names, imported when they are first used.

Importing `serve` alone is cheap: torch comes with the engine, not with the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.config import EngineConfig
    from serve.embedding import EmbeddingOutput
    from serve.engine import Engine
    from serve.llm import LLM
    from serve.prompt_outputs import PoolingParams
    from serve.request import (
        FinishReason,
        SamplingParams,
        TokenDelta,
    )
    from serve.request_output import CompletionOutput, RequestOutput
    from serve.request_stream import RequestStream

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "serve.llm",
    "CompletionOutput": "serve.request_output",
    "EmbeddingOutput": "serve.embedding",
    "Engine": "serve.engine",
    "EngineConfig": "serve.config",
    "FinishReason": "serve.request",
    "PoolingParams": "serve.prompt_outputs",
    "RequestOutput": "serve.request_output",
    "RequestStream": "serve.request_stream",
    "SamplingParams": "serve.request",
    "TokenDelta": "serve.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "PoolingParams",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TokenDelta",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
