"""What a memory policy answers and is told. No torch, no asyncio."""

from __future__ import annotations

from collections.abc import Callable

from memory.pages.kv_range import PrefixHit
from serve.scheduler.sequence import Sequence


class MemoryPolicy:
    """The base: admits everything, learns nothing. step: the scheduler's number of steps, or of
    passes through a pipeline, in each of which a sequence gets a token."""

    predicted_peak_pages: int | None = None
    """The predicted peak at the last call of `admits`."""

    num_stages = 1
    """The stages of the pipeline that computes the steps."""

    tokens_per_step: Callable[[Sequence], float] | None = None
    """The tokens that a step is expected to give a sequence; None: one."""

    def admits(
        self,
        sequence: Sequence,
        running: list[Sequence],
        step: int,
        hit: PrefixHit | None = None,
    ) -> bool:
        """Returns whether the sequence may run beside the running ones, with this prefix hit. Its
        present tokens fit."""
        return True

    def arrived(self, sequence: Sequence) -> None:
        """Notes a sequence that was queued."""

    def started(self, sequence: Sequence, step: int) -> None:
        """Notes a sequence that was admitted."""

    def stopped(self, sequence: Sequence) -> None:
        """Notes a running sequence that freed its pages: finished or preempted, by its status."""

    def preempted_by_priority(self, sequence: Sequence) -> None:
        """Notes a sequence preempted for a more urgent one, not because memory ran out."""
        self.stopped(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Notes a finished sequence, running or waiting; its finish_reason is set."""

    def coverage(self) -> tuple[float | None, float | None]:
        """Returns the shares of answers within the P50 and P90 predicted on arrival, or None."""
        return None, None

    def steps_left(self, step: int) -> list[int]:
        """Returns the predicted steps until each running sequence ends, rising; empty if nothing is
        predicted. Any thread may call it."""
        return []

    def mean_steps(self) -> float:
        """Returns the mean of the steps that a running sequence is predicted to take in all."""
        return 0.0

    def expected_length(self, sequence: Sequence) -> int:
        """Returns the median of the answer's length, given its tokens so far; max_tokens if nothing
        is predicted."""
        return sequence.max_tokens_total - sequence.num_prompt_tokens

    def saw_state(self, sequence: Sequence, num_output: int, sketch: object) -> None:
        """Notes a sketch of a sequence's hidden state (SequencePredictor.saw_state)."""

    def still_refuses(self, sequence: Sequence, step: int) -> bool:
        """Returns whether `admits` would refuse again, whatever the hit: nothing has changed."""
        return False
