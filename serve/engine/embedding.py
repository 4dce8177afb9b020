"""What a caller gets for an embedding."""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.node_recovery import NO_MEMORY
from serve.errors import EngineStoppedError, GenerationError, MemoryLostError
from serve.request import FinishReason, Request, RequestMetrics, TokenDelta
from serve.scheduler.prompt_outputs import Vector


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: [dimensions] fp32."""

    request_id: str
    embedding: Vector
    num_prompt_tokens: int
    metrics: RequestMetrics


def embedding_output(
    request: Request, last: TokenDelta | None, metrics: RequestMetrics
) -> EmbeddingOutput:
    """last: the request's last delta. GenerationError, EngineStoppedError: it did not get there."""
    if last is None or last.finish_reason is FinishReason.ABORT:
        raise EngineStoppedError("the request was aborted")
    if last.error is not None:
        kind = MemoryLostError if last.error in NO_MEMORY else GenerationError
        raise kind(last.error)
    assert last.embedding is not None, f"{last}"
    count = len(request.prompt_token_ids)
    return EmbeddingOutput(request.request_id, last.embedding, count, metrics)
