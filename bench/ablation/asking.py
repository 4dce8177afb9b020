"""A load generator's target that keeps the answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from bench.load.record import Record
from bench.load.targets import PROMPT_TOKENS
from bench.load.work import Work
from serve import Engine, FinishReason, SamplingParams
from serve.errors import GenerationError


class Asking:
    """tokens: of every answer, by the number of its request. The engine has been started."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.model_name
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS
        self.tokens: dict[int, list[int]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The engine is somebody else's."""

    async def send(self, work: Work, record: Record) -> None:
        params = SamplingParams(
            max_tokens=work.max_tokens, temperature=0.0, ignore_eos=work.ignore_eos
        )
        if work.messages is not None:
            stream = self.engine.submit_chat(work.messages, params, client=work.client)
        else:
            prompt = work.token_ids or work.prompt or ""
            stream = self.engine.submit(prompt, params, client=work.client)
        tokens: list[int] = []
        async for delta in stream:
            if delta.token_ids:
                record.chunks_s.append(time.perf_counter())
                tokens += delta.token_ids
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise GenerationError(delta.error or "the request was aborted")
        record.prompt_tokens = len((await stream.accepted()).prompt_token_ids)
        record.output_tokens = len(tokens)
        self.tokens[record.index] = tokens
