"""What the engine's rank knows of a group of ranks, for statistics and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's place, host name and state: up, or lost until it is replaced."""

    stage: int
    tensor: int
    host: str
    state: str


@dataclass(slots=True)
class StageSeconds:
    """Where the time of the engine's stage went, in seconds. busy: it computed; wait: for the stage
    before it; exchange: for columns of the other tensor ranks."""

    busy: float = 0.0
    wait: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A snapshot. stage: the engine's, to which `seconds` belongs. num_restarts: how often the
    group was formed again after a loss."""

    ranks: tuple[RankState, ...]
    stage: int
    seconds: StageSeconds
    num_restarts: int
