"""The error of K/V that was written to a disk and cannot be read back."""

from __future__ import annotations


class KVLostError(OSError):
    """K/V of running sequences is not in memory and cannot be read from the disk, or has changed
    there. What was computed before it can be computed again."""

    @classmethod
    def of(cls, error: OSError) -> KVLostError:
        """Returns what follows from a failed read or write."""
        return cls(error.errno, f"K/V on disk: {error.strerror or error}")
