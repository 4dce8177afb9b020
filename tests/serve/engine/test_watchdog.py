"""The watchdog reports a stalled step, but not a slow, large or first one of its size."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve.engine import watchdog as watchdog_module
from serve.engine.watchdog import MAX_ROW_S, MIN_STALL_S, Watchdog
from serve.sampling_params import SamplingParams
from tests.support.engine.engine_rig import PROMPT, Rig


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_an_idle_loop_is_not_stalled() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    for _ in range(3):
        clock.now_s += 1e6
        assert watchdog.stalled_s() is None
        watchdog.begin(8)
        clock.now_s += 1
        watchdog.rest()


def test_a_round_is_stalled_after_the_bound() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.begin(1)
    clock.now_s += MIN_STALL_S
    assert watchdog.stalled_s() is None
    clock.now_s += 1
    assert watchdog.stalled_s() == pytest.approx(MIN_STALL_S + 1)
    watchdog.begin(1)
    assert watchdog.stalled_s() is None


def test_slow_steps_are_learned() -> None:
    """If steps take a minute each, a step is stalled after five minutes."""
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.begin(512)
    clock.now_s += 60
    assert watchdog.stalled_s() is None
    for _ in range(3):
        watchdog.begin(512)
        clock.now_s += 299
        assert watchdog.stalled_s() is None
        clock.now_s -= 239
    watchdog.begin(1)
    clock.now_s += 301
    assert watchdog.stalled_s() is not None


def test_the_bound_of_a_larger_step_grows_with_its_rows() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    for _ in range(100):
        watchdog.begin(32)
        clock.now_s += 0.01
    watchdog.begin(8192)
    clock.now_s += MAX_ROW_S * 8192
    assert watchdog.stalled_s() is None
    clock.now_s += 1
    assert watchdog.stalled_s() is not None
    watchdog.begin(8192)  # it ended after all, so the bound covers such steps from now on
    assert watchdog.stalled_s() is None


def test_a_frozen_step_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow steps below the bound are not stalled; a frozen step is until it continues."""
    monkeypatch.setattr(watchdog_module, "MIN_STALL_S", 0.25)
    monkeypatch.setattr(watchdog_module, "MAX_ROW_S", 0.01)
    frozen = threading.Event()
    frozen.set()
    slow_s = 0.03

    def before(plan: object) -> None:
        time.sleep(slow_s)
        frozen.wait()

    async def main() -> None:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        async with Rig(before=before) as rig:
            engine = rig.engine
            running = asyncio.create_task(engine.generate(PROMPT, params))
            while not running.done():
                assert engine.stall_reason() is None
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.4)  # idle for longer than the bound
            assert engine.stall_reason() is None
            running = asyncio.create_task(engine.generate(PROMPT, params))
            await asyncio.sleep(0.1)
            assert engine.stall_reason() is None
            frozen.clear()
            began = time.monotonic()
            while engine.stall_reason() is None:
                await asyncio.sleep(0.01)
                assert time.monotonic() - began < 5
            assert "a step has taken" in (engine.stall_reason() or "")
            assert time.monotonic() - began > 0.2
            frozen.set()
            await running
            assert engine.stall_reason() is None

    asyncio.run(main())


def test_a_dead_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Rig() as rig:
            watchdog = rig.engine.loaded.core.watchdog
            monkeypatch.setattr(watchdog, "_is_output_alive", lambda: False)
            assert rig.engine.stall_reason() == "the thread that delivers answers has ended"

    asyncio.run(main())
