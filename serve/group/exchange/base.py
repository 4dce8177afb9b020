"""The collective of tensor parallelism by outputs: every rank computes some columns of a result,
and all ranks need all of them. Nothing is summed, so the bits are those of one process.

Every rank makes the same calls in the same order: for each result
`begin`, its own columns, `complete`, before the next `begin`. A buffer is valid until the call of
`begin` that is NUM_SLOTS - 1 later; it is not written again by this rank once it is complete, since
the others read it.
"""

from __future__ import annotations

from typing import Protocol

from ops import sharded


class Exchange(sharded.Exchange, Protocol):
    """An exchange as products use it, with what it has measured. `begin` raises BufferTooLarge;
    `complete` raises ExchangeError, after which a new generation is needed."""

    @property
    def waited_s(self) -> float:
        """The seconds that this rank has spent in `complete`."""

    @property
    def num_completed(self) -> int:
        """The number of results that are complete."""

    def close(self) -> None:
        """Gives back what the exchange holds. Buffers that are still referred to stay."""


class RankExchange(Exchange, Protocol):
    """An exchange as a rank of a group uses it. All but `abort` are called by one thread."""

    def prepare(self) -> None:
        """Makes ready what the first result would wait for. Raises ExchangeError."""

    def settle(self) -> None:
        """Returns when this rank has all columns of what is complete. Raises ExchangeError."""

    def abort(self) -> None:
        """Makes `complete` raise Aborted on this rank. Any thread may call it."""

    def abort_group(self) -> None:
        """Makes `complete` raise Aborted on all ranks."""

    def join(self, generation: int) -> None:
        """Takes part in a generation of a number that is larger than all before. Raises Aborted."""
