"""The memory of units: frames of one size, given to one unit after the other.

The system gives memory to a frame when it is used first, and never takes it back, so that a unit
that comes in costs its bytes alone.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from memory.tiers.direct_io import address_of

Places = npt.NDArray[np.int64]
"""Addresses."""

_HUGE_BYTES = 2 << 20
_ADVICE = (
    mmap.MADV_HUGEPAGE,
    mmap.MADV_DONTFORK,  # a copy of the process has no use for it, and must not move it
)


class Frames:
    """Frames in memory, and which of them are free. It locks nothing."""

    def __init__(self, frame_bytes: int, num_frames: int) -> None:
        """Raises OSError."""
        self.frame_bytes, self.num_frames = frame_bytes, num_frames
        size = -(-frame_bytes * num_frames // _HUGE_BYTES) * _HUGE_BYTES
        # with addresses to spare, so that huge pages begin where the frames do
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size + _HUGE_BYTES, flags=flags)
        for advice in _ADVICE:
            with contextlib.suppress(OSError):  # a system without it does as well
                self._memory.madvise(advice)
        address = address_of(self._memory)
        self.address = address + -address % _HUGE_BYTES
        # The last ones are taken first: those that were free last, and at the start the lowest.
        numbers = np.arange(num_frames, dtype=np.int64)[::-1]
        self._free: Places = self.address + numbers * frame_bytes
        self.num_free = num_frames

    @property
    def used_bytes(self) -> int:
        return (self.num_frames - self.num_free) * self.frame_bytes

    def take(self, count: int) -> Places:
        """Returns frames that are free, which now are the caller's."""
        assert 0 <= count <= self.num_free, f"{count=} of {self.num_free}"
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()

    def give_back(self, places: Places) -> None:
        """Makes frames free that `take` has returned."""
        end = self.num_free + len(places)
        assert end <= self.num_frames, "frames that were taken"
        self._free[self.num_free : end] = places
        self.num_free = end

    def close(self) -> None:
        """Ends the memory. No frame is used any more."""
        self._memory.close()
