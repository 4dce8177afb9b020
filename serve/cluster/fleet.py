"""Several replicas of one model behind one address, and their rolling update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from serve.errors import MergestepError

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
    def use(self, urls: list[str]) -> None: ...


class Fleet:
    """Call step again and again. make: starts a replica in its place."""

    def __init__(
        self,
        replicas: Sequence[FleetReplica],
        front: FleetFront,
        say: Callable[[str], object],
        make: Callable[[int], FleetReplica],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas: list[FleetReplica | None] = list(replicas)
        self._front = front
        self._say = say
        self._make = make
        self._clock = clock
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

    def _look(self, number: int) -> None:
        replica = self.replicas[number]
        if replica is None:
            if self._clock() >= self._retry_s[number]:
                self.replicas[number] = self._make(number)
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
            replica = self.replicas[number]
            if replica is None or not replica.is_ready or replica.pids()[0] == before:
                return
            self._updated = None
            self._say(f"replica {number} serves again")
        if not self._waiting or self.num_ready < min(2, len(self.replicas)):
            return  # the streams need another one to go on at
        number = self._waiting.pop(0)
        replica = self.replicas[number]
        if replica is not None and replica.is_ready:
            self._updated = number, replica.pids()[0]
            self._say(f"replica {number} hands its streams over and starts again")
            replica.restart()
