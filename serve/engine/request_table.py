"""What the core keeps of a request while it is inside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from serve.engine.output_processor import RequestTimes, Sink
from serve.request import RequestMetrics, SamplingParams
from serve.scheduler.prompt_outputs import PoolingParams
from serve.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)


class RequestState:
    """One submitted request inside the core. `sequences` is filled once it is tokenized."""

    __slots__ = (
        "client",
        "is_aborted",
        "params",
        "pooling",
        "prompt",
        "request_id",
        "sequences",
        "sink",
        "times",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sink: Sink,
        now_s: float,
        client: str | None = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.client = client
        self.params = params
        self.pooling = pooling
        self.sink = sink
        self.times = RequestTimes(now_s)
        self.sequences: list[Sequence] = []
        self.is_aborted = False

    def metrics(self) -> RequestMetrics:
        """From any thread: while it runs, the counts may be a step old."""
        sequences = self.sequences
        return replace(
            self.times.metrics(),
            num_prompt_tokens=sequences[0].num_prompt_tokens if sequences else 0,
            num_output_tokens=sum(s.num_output_tokens for s in sequences),
            finish_reasons=tuple(s.finish_reason.value for s in sequences if s.finish_reason),
        )

    def tell(self, act: Callable[[], None]) -> None:
        """A consumer's own fault is logged and harms nobody else."""
        try:
            act()
            self.sink.wake()
        except Exception:
            logger.exception("the consumer of %s cannot be told", self.request_id)
