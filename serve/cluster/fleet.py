"""Several replicas of one model behind one address: their number and their rolling update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from serve.cluster.scaling import Scaling, ScalingLimits
from serve.errors import MergestepError

_LEAVE_S = 5.0  # in which a replica that is too many hands its streams over
_RETRY_S = 30.0  # before a replica that cannot be started is tried again, beside others that serve


class FleetReplica(Protocol):
    """A replica, as the fleet sees it."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def http_url(self) -> str: ...
    def pids(self) -> list[int]: ...
    def step(self) -> None: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


class FleetFront(Protocol):
    @property
    def num_calls(self) -> int: ...
    @property
    def queue_s(self) -> float: ...
    def use(self, urls: list[str]) -> None: ...


class Fleet:
    """Call step again and again. make: starts a replica in its place."""

    def __init__(
        self,
        replicas: Sequence[FleetReplica],
        front: FleetFront,
        say: Callable[[str], object],
        make: Callable[[int], FleetReplica],
        limits: ScalingLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas: list[FleetReplica | None] = list(replicas)
        self._front = front
        self._say = say
        self._make = make
        self._clock = clock
        self._scaling = Scaling(limits or ScalingLimits(len(replicas), len(replicas)))
        self._leaving: list[tuple[FleetReplica, float]] = []
        self._grow_at_s = 0.0
        self._urls: list[str] = []
        self._was_ready = False
        self._retry_s: dict[int, float] = {}
        self._waiting: list[int] = []  # replicas that are still to be updated
        self._updated: tuple[int, int] | None = None  # the one that is, and its process before

    @property
    def num_ready(self) -> int:
        return len(self._urls)

    @property
    def is_updating(self) -> bool:
        return bool(self._waiting) or self._updated is not None

    def update(self) -> None:
        """Starts every replica again, one after the other: each hands its streams over to the
        others, and the next one follows when it is ready again."""
        self._waiting = list(range(len(self.replicas)))

    def step(self) -> None:
        """Looks after all replicas once. MergestepError if none can be started."""
        for number in range(len(self.replicas)):
            self._look(number)
        urls = [r.http_url for r in self.replicas if r is not None and r.is_ready]
        if urls != self._urls:
            self._urls = urls
            self._front.use(urls)
        self._was_ready = self._was_ready or bool(urls)
        self._update_next()
        self._scale()

    def close(self) -> None:
        """Ends all replicas."""
        for replica in (*self.replicas, *(leaving for leaving, _ in self._leaving)):
            if replica is not None:
                replica.close()

    def _scale(self) -> None:
        now_s, count = self._clock(), len(self.replicas)
        while self._leaving and now_s >= self._leaving[0][1]:
            self._leaving.pop(0)[0].close()
        front = self._front
        wanted = self._scaling.wanted(now_s, count, self.num_ready, front.queue_s, front.num_calls)
        if wanted > count and now_s >= self._grow_at_s:
            self._grow(count, now_s)
        elif wanted < count and not self.is_updating:
            self._say(f"{wanted} replicas are enough")
            replica = self.replicas.pop()
            self._urls = [r.http_url for r in self.replicas if r is not None and r.is_ready]
            front.use(self._urls)
            if replica is not None:
                replica.restart()  # it hands its streams over and is not looked after any more
                self._leaving.append((replica, now_s + _LEAVE_S))

    def _grow(self, number: int, now_s: float) -> None:
        self._say(f"replica {number} is started")
        try:
            self.replicas.append(self._make(number))
        except MergestepError as error:
            if not self._was_ready:
                raise
            self._say(f"there is no room for replica {number}: {error}")
            self._grow_at_s = now_s + _RETRY_S

    def _retry(self, number: int) -> None:
        try:
            self.replicas[number] = self._make(number)
        except MergestepError as error:
            self._say(f"there is no room for replica {number}: {error}")
            self._retry_s[number] = self._clock() + _RETRY_S

    def _look(self, number: int) -> None:
        replica = self.replicas[number]
        if replica is None:
            if self._clock() >= self._retry_s[number]:
                self._retry(number)
            return
        try:
            replica.step()
        except MergestepError as error:
            if not self._was_ready:
                raise
            self._say(f"replica {number} cannot be started, again in {_RETRY_S:g} s: {error}")
            replica.close()
            self.replicas[number], self._retry_s[number] = None, self._clock() + _RETRY_S

    def _update_next(self) -> None:
        if self._updated is not None:
            number, before = self._updated
            replica = self.replicas[number] if number < len(self.replicas) else None
            if replica is None or not replica.is_ready or replica.pids()[0] == before:
                return
            self._updated = None
            self._say(f"replica {number} serves again")
        if not self._waiting or self.num_ready < min(2, len(self.replicas)):
            return  # the streams need another one to go on at
        number = self._waiting.pop(0)
        replica = self.replicas[number] if number < len(self.replicas) else None
        if replica is not None and replica.is_ready:
            self._updated = number, replica.pids()[0]
            self._say(f"replica {number} hands its streams over and starts again")
            replica.restart()
