"""The ring of buffers through which layers stream.

Every streamed unit has its place in the ring from the start, in the order in which a step uses
them: unit j is read to buffer j modulo their number. As soon as a unit has been computed with, the
next one of its buffer is read, over the end of the step: the disk never waits for the computation,
except for one that is slower than it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from serve.loading.streaming.reader import Fetch, WeightReader
from serve.loading.streaming.units import Unit


class Ring:
    """Buffers for units that are used in turn. Only the thread that computes calls it."""

    def __init__(self, reader: WeightReader, units: Sequence[Unit], buffers: Sequence[int]) -> None:
        """buffers: the addresses of the buffers, each of which takes every unit."""
        self._reader, self._buffers, self.units = reader, buffers, units
        self._content: list[int | None] = [None] * len(buffers)
        self._fetches: list[Fetch | None] = [None] * len(buffers)
        self._users = [0] * len(units)

    def start(self) -> None:
        """Begins to read the first units."""
        for number in range(min(len(self._buffers), len(self.units))):
            self._load(number)

    @contextmanager
    def using(self, number: int) -> Iterator[None]:
        """Keeps a unit in its buffer. WeightsLostError."""
        self.enter(number)
        try:
            yield
        finally:
            self.leave(number)

    def enter(self, number: int) -> None:
        """Waits for a unit and keeps it until `leave`. WeightsLostError."""
        buffer = number % len(self._buffers)
        ahead = self._fetches[buffer]
        if ahead is not None and ahead.is_done and ahead.error is not None:
            self._content[buffer] = self._fetches[buffer] = None  # the disk may be well again
        if self._content[buffer] != number:  # the step before was not finished, or left it out
            self._load(number)
        fetch = self._fetches[buffer]
        if fetch is not None:
            try:
                self._reader.wait(fetch)
            except BaseException:
                if fetch.is_done:
                    self._content[buffer] = self._fetches[buffer] = None
                raise
            self._fetches[buffer] = None
        self._users[number] += 1

    def has_come(self, number: int) -> bool:
        """Returns whether `enter` would neither wait nor fail."""
        buffer = number % len(self._buffers)
        fetch = self._fetches[buffer]
        is_missing = fetch is not None and (not fetch.is_done or fetch.error is not None)
        return self._content[buffer] == number and not is_missing

    def leave(self, number: int) -> None:
        """Gives a unit's buffer to the next one, unless another pass uses it, too."""
        self._users[number] -= 1
        if not self._users[number]:
            after = number + len(self._buffers)
            self._load(after if after < len(self.units) else number % len(self._buffers))

    def _load(self, number: int) -> None:
        buffer = number % len(self._buffers)
        content, fetch = self._content[buffer], self._fetches[buffer]
        if content == number:
            return
        assert content is None or not self._users[content], "a buffer that is used"
        if fetch is not None:  # what was read ahead is not needed
            fetch.join()
        self._content[buffer] = self._fetches[buffer] = None  # nothing whole, until it is asked for
        self._fetches[buffer] = self._reader.fetch(self.units[number], self._buffers[buffer])
        self._content[buffer] = number
