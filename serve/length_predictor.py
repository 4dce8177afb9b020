"""What predicts the lengths of answers (`EngineConfig.length_predictor`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from serve.request import Request


class LengthPredictor(Protocol):
    """Predicts the distribution of a request's number of output tokens.

    The compute loop calls the methods between two steps, so each must return within microseconds
    and must not block. A learned predictor that needs longer computes elsewhere, when the request
    is tokenized, and looks the result up here by request_id.
    """

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        """Returns the smallest length, in tokens, that the answer stays within with probability
        `level`, given that it has num_output tokens and continues: more than num_output and at
        most params.max_tokens."""

    def observe(self, request: Request, num_output: int) -> None:
        """Records an answer that ended by itself after num_output tokens."""

    def observe_cut(self, request: Request, num_output: int) -> None:
        """Records an answer that was cut off after num_output tokens (max_tokens, abort); it
        would have been longer."""
