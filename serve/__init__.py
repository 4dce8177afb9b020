"""mergestep's public names, each imported on first use, so that `import serve` is fast.

This package owns the life of a request, from the command line or HTTP to its last token; its own
modules are the nouns and settings that its folders share. It does not know kernels, page mapping or
connections between machines. Begin with config.py and request.py, then engine/core.py. torch is
imported with the engine, not with the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.config import EngineConfig
    from serve.engine.engine import Engine
    from serve.engine.llm import LLM
    from serve.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from serve.engine.request_stream import RequestStream
    from serve.pooling import PoolingParams
    from serve.request import FinishReason, TokenDelta
    from serve.sampling_params import SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "serve.engine.llm",
    "CompletionOutput": "serve.engine.outputs",
    "EmbeddingOutput": "serve.engine.outputs",
    "Engine": "serve.engine.engine",
    "EngineConfig": "serve.config",
    "FinishReason": "serve.request",
    "PoolingParams": "serve.pooling",
    "RequestOutput": "serve.engine.outputs",
    "RequestStream": "serve.engine.request_stream",
    "SamplingParams": "serve.sampling_params",
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
