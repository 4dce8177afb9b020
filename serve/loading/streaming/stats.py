"""The figures of weights that are not all where steps compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamStats:
    """resident_bytes: the memory of all weights here, buffers included. stalled_s: for which
    steps waited. repeated, failed: pieces that were read again or could not be read. Experts that
    steps used were in memory (hits), on their way (late) or on the disk (misses); guesses: those
    that were read ahead for the next layer."""

    resident_bytes: int
    read_bytes: int
    stalled_s: float = 0.0
    repeated: int = 0
    failed: int = 0
    expert_hits: int = 0
    expert_late: int = 0
    expert_misses: int = 0
    expert_guesses: int = 0
    expert_used_guesses: int = 0
