"""A model's child process without a process."""

from __future__ import annotations

import asyncio

from serve.cluster.models.child import Child, ChildSpec


def test_waiting_for_its_end_is_bounded_and_ends_nothing() -> None:
    async def check() -> None:
        child = Child(ChildSpec("a", "", {}), print)
        await child.wait(30)  # it has never run
        watching = child._watching = asyncio.create_task(asyncio.sleep(30))
        await child.wait(0.05)
        assert not watching.done() and not watching.cancelling()
        watching.cancel()
        await child.wait(30)
        assert watching.cancelled()

    asyncio.run(asyncio.wait_for(check(), 10))
