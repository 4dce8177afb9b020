"""Bounds the CPU time that the masks of a request take."""

from __future__ import annotations

# A request may overdraw this many seconds of CPU time, for its masks and for consuming tokens
# between two steps, while all other requests wait. A mask (more with a larger vocabulary) or a
# token that takes less than its usual time earns the difference.
_MASKS_S, _USUAL_MASK_S, _USUAL_MASK_S_PER_TOKEN = 1.0, 0.5e-3, 20e-9
_TOKENS_S, _USUAL_TOKEN_S = 5e-3, 0.1e-3


class MaskBudget:
    """The CPU time that the masks of a request may still take.

    Any thread may use it; an update may get lost when two threads do so at once.
    """

    def __init__(self, vocab_size: int) -> None:
        self._usual_mask_s = _USUAL_MASK_S + _USUAL_MASK_S_PER_TOKEN * vocab_size
        self._masks_s, self._tokens_s = _MASKS_S, _TOKENS_S

    @property
    def is_spent(self) -> bool:
        """Whether the masks have taken more than the budget."""
        return self._masks_s <= 0

    @property
    def may_consume(self) -> bool:
        """Whether a token may be consumed between two steps, or only with the next mask."""
        return self._tokens_s > 0

    def add_mask(self, seconds: float) -> None:
        """Charges the time of a mask."""
        self._masks_s = min(_MASKS_S, self._masks_s + self._usual_mask_s - seconds)

    def add_token(self, seconds: float) -> None:
        """Charges the time of a token that was consumed between two steps."""
        self._tokens_s = min(_TOKENS_S, self._tokens_s + _USUAL_TOKEN_S - seconds)
