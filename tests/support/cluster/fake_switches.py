"""Switches of models without processes, for tests of the pool and of the front."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from serve.cluster.models.child import ChildSpec
from serve.cluster.models.model import Model
from serve.errors import MergestepError


class FakeChild:
    """A child that never ran. status: None while it lives. end_s: how long after the loss of its
    connections it ends, None if it does not."""

    def __init__(self, url: str, on_end: Callable[[], object]) -> None:
        self.url = url
        self.status: int | None = None
        self.how = "signal 9"
        self.signals: list[int] = []
        self.end_s: float | None = None
        self._on_end = on_end

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    async def wait(self, seconds: float) -> None:
        if self.end_s is not None and self.end_s <= seconds:
            await asyncio.sleep(self.end_s)
            if self.status is None:
                self.die()

    async def kill(self) -> None:
        self.die()

    def die(self) -> None:
        self.status = -9
        self._on_end()


class FakeSwitches:
    """Each switch takes switch_s. fails: names of models whose next start or wake fails. log: what
    has been done, in order."""

    def __init__(self, *, switch_s: float = 0.01, url: str = "http://x") -> None:
        self.switch_s = switch_s
        self.url = url
        self.log: list[str] = []
        self.fails: Counter[str] = Counter()
        self.no_sleep: set[str] = set()

    async def start(self, model: Model, on_end: Callable[[], object]) -> None:
        child: Any = FakeChild(self.url, on_end)
        model.child = child
        await self._do("start", model)

    async def wake(self, model: Model) -> None:
        await self._do("wake", model)

    async def sleep(self, model: Model) -> None:
        if model.name in self.no_sleep:
            raise MergestepError("it cannot")
        await self._do("sleep", model)

    async def end(self, model: Model) -> None:
        if model.child is not None:
            model.child = None
            await self._do("stop", model)

    async def retire(self, model: Model) -> None:
        await self.end(model)

    async def metrics(self, model: Model) -> bytes | None:
        return b"its own\n" if model.child is not None else None

    async def _do(self, what: str, model: Model) -> None:
        self.log.append(f"{what} {model.name}")
        await asyncio.sleep(self.switch_s)
        if what in ("start", "wake") and self.fails[model.name]:
            self.fails[model.name] -= 1
            raise MergestepError("no weights")


def make_model(name: str, awake: int = 100, asleep: int = 10) -> Model:
    return Model(ChildSpec(name, "", {}), awake, asleep)
