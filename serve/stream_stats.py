"""What /metrics shows of weights that are read from the disk in every step."""

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
    stalled_s: float
    repeated: int
    failed: int
    expert_hits: int
    expert_late: int
    expert_misses: int
    expert_guesses: int
    expert_used_guesses: int
