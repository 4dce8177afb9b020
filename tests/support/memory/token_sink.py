"""A sink that notes the tokens of a sequence."""

from __future__ import annotations

import time

from serve.request import Request, TokenDelta


class TokenSink:
    """Takes the results of a request with one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_over = False
        self.ended_s = 0.0

    def accept(self, request: Request) -> None:
        """Nothing is to be done."""

    def push(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.ended_s = time.monotonic()
            self.is_over = True

    def wake(self) -> None:
        """Nothing waits."""

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)
