"""One of several models: its state, its memory, its requests and its counters."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve.cluster.models.child import Child, ChildSpec
from serve.histogram import Histogram

WAIT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class State(StrEnum):
    """STOPPED has no process; ASLEEP has one that holds neither weights nor K/V."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"


class Switch(StrEnum):
    """A change of a model's state that takes time."""

    START = "start"
    WAKE = "wake"
    SLEEP = "sleep"
    STOP = "stop"


@dataclass(slots=True)
class Waiter:
    """A request that waits for its model. arrived_s: in seconds of the event loop's clock."""

    arrived_s: float
    is_let_in: asyncio.Future[None]


@dataclass(slots=True)
class Model:
    """A model of the pool.

    awake_bytes, asleep_bytes: what it takes, or is expected to take until that is measured; K/V
    counts with all that it may take. leaving_bytes: what it has while it is being stopped. about:
    its object of /v1/models, once it has run. used_s: when its last request began or ended.
    has_slept: in this process or an earlier one. ready_s: since when it is ready. num_failures:
    since its last success; num_failed: since the start. failure: why the last start failed.
    retry_s: it is not started before.
    """

    spec: ChildSpec
    awake_bytes: int
    asleep_bytes: int
    state: State = State.STOPPED
    child: Child | None = None
    about: dict[str, Any] = field(default_factory=dict)
    running: int = 0
    waiters: deque[Waiter] = field(default_factory=deque)
    is_giving_way: bool = False
    has_slept: bool = False
    used_s: float = 0.0
    ready_s: float = 0.0
    leaving_bytes: int = 0
    num_failures: int = 0
    retry_s: float = 0.0
    failure: str = ""
    num_failed: int = 0
    switch_s: dict[Switch, Histogram] = field(
        default_factory=lambda: {switch: Histogram(WAIT_SECONDS) for switch in Switch}
    )
    wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def held_bytes(self) -> int:
        """The bytes that it has, or that the switch in progress needs."""
        if self.state is State.STOPPED:
            return 0
        if self.state is State.STOPPING:
            return self.leaving_bytes
        return self.asleep_bytes if self.state is State.ASLEEP else self.awake_bytes

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and (not self.waiters or self.is_giving_way)

    def refuse(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
