"""Requests wait for their models: who gets memory, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from serve.cluster.models import pool as pool_module
from serve.cluster.models.model import State
from serve.cluster.models.pool import ModelPool
from serve.http.edge.errors import ApiError
from tests.support.cluster.fake_switches import FakeSwitches, make_model

Check = Callable[[ModelPool, FakeSwitches], Awaitable[None]]


def run(
    check: Check,
    *names: str,
    budget: int = 200,
    asleep: int = 10,
    idle_s: float = 1e9,
    max_waiting: int = 100,
    switch_s: float = 0.01,
) -> FakeSwitches:
    """Runs a check over a pool; with the usual budget two models fit."""
    switches = FakeSwitches(switch_s=switch_s)

    async def live() -> None:
        models = [make_model(name, asleep=asleep) for name in names]
        pool = ModelPool(
            models,
            switches,  # type: ignore[arg-type]
            budget_bytes=budget,
            idle_s=idle_s,
            max_waiting=max_waiting,
        )
        try:
            async with asyncio.timeout(20):
                await check(pool, switches)
        finally:
            await pool.close()

    asyncio.run(live())
    return switches


async def use(pool: ModelPool, name: str, seconds: float = 0.0, timeout_s: float = 10.0) -> None:
    model = pool.models[name]
    await pool.acquire(model, timeout_s)
    try:
        assert model.state is State.READY
        await asyncio.sleep(seconds)
    finally:
        pool.release(model)


def refusal(result: BaseException | None) -> tuple[int, str | None]:
    assert isinstance(result, ApiError), result
    return result.status, result.code


def test_a_model_starts_on_demand_and_stays() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        await asyncio.gather(*(use(pool, "a") for _ in range(5)))
        await use(pool, "a")
        assert switches.log == ["start a"]
        assert pool.num_running == 0 and pool.num_waiting == 0

    run(check, "a", "b")


def test_the_least_recently_used_model_goes_to_sleep() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        for name in ("a", "b", "a", "c"):
            await use(pool, name)
        assert switches.log[:3] == ["start a", "start b", "sleep b"]
        assert pool.models["b"].state is State.ASLEEP
        await use(pool, "b")
        assert switches.log[-1] == "wake b"
        assert pool.held_bytes <= pool.budget_bytes

    run(check, "a", "b", "c", budget=215)


def test_what_sleeps_is_stopped_where_sleep_does_not_suffice() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        for name in ("a", "b", "c"):
            await use(pool, name)
        assert switches.log == ["start a", "start b", "stop a", "start c"]

    run(check, "a", "b", "c", asleep=90)


def test_a_request_waits_for_busy_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TURN_S", 0.0)
    monkeypatch.setattr(pool_module, "TURN_FACTOR", 0.0)

    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        first = [asyncio.create_task(use(pool, name, 0.3)) for name in ("a", "b")]
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(use(pool, "c"))
        await asyncio.sleep(0.05)
        assert pool.models["a"].is_giving_way, "or c would wait for as long as requests for a come"
        later = asyncio.create_task(use(pool, "a"))
        await asyncio.gather(*first, waiting, later)
        assert "start c" in switches.log

    run(check, "a", "b", "c")


def test_steady_load_does_not_starve_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TURN_S", 0.1)

    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        is_over = False

        async def load(name: str) -> None:
            while not is_over:
                await use(pool, name, 0.02)

        loads = [asyncio.create_task(load(name)) for name in "aabb"]
        await asyncio.sleep(0.05)
        for name in "cdc":
            await use(pool, name, timeout_s=3.0)
        is_over = True
        await asyncio.gather(*loads)

    run(check, "a", "b", "c", "d")


def test_a_model_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TURN_S", 0.4)

    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        running = asyncio.create_task(use(pool, "a", 0.2))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(use(pool, "b"))
        await asyncio.sleep(0.05)
        await use(pool, "a")  # not held up by b
        assert switches.log == ["start a"]
        await asyncio.gather(running, other)

    run(check, "a", "b", budget=100)


def test_too_many_waiting_and_too_late() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(use(pool, "a", 0.6))
            await asyncio.sleep(0.05)
            late = [asyncio.create_task(use(pool, "b", timeout_s=0.2)) for _ in range(2)]
            await asyncio.sleep(0.05)
            with pytest.raises(ApiError) as full:
                await use(pool, "b")
            assert refusal(full.value) == (429, "queue_full")
            results = await asyncio.gather(*late, return_exceptions=True)
            for result in results:
                assert refusal(result) == (504, "model_wait_timeout")  # type: ignore[arg-type]
                assert "model b" in str(result) and "held by a" in str(result)
        assert pool.models["b"].refused == {"queue_full": 1, "model_wait_timeout": 2}
        await use(pool, "b")

    run(check, "a", "b", budget=100, max_waiting=2)


@pytest.mark.exhaustive
def test_a_failed_start_is_told_and_tried_again() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        switches.fails["a"] = 2
        results = await asyncio.gather(use(pool, "a"), use(pool, "a"), return_exceptions=True)
        for result in results:
            assert refusal(result) == (503, "model_failed")
            assert "model a cannot be served: no weights" in str(result)
        with pytest.raises(ApiError):
            await use(pool, "a")
        await use(pool, "a")  # waits for the pause after the second failure
        assert switches.log.count("start a") == 3
        assert pool.models["a"].num_failed == 2 and pool.models["a"].failure == ""

    run(check, "a", "b")


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_dead_process_is_started_again(is_asleep: bool) -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        model = pool.models["a"]
        await use(pool, "a")
        if is_asleep:
            await pool.put_to_sleep(model)
        assert model.child is not None
        model.child.die()  # type: ignore[attr-defined]
        assert model.state is State.STOPPED and pool.held_bytes == 0
        await use(pool, "a")
        assert [each for each in switches.log if each == "start a"] == ["start a"] * 2

    run(check, "a")


def test_a_process_that_dies_as_it_gets_ready_is_a_failure() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        waiting = asyncio.create_task(use(pool, "a"))
        await asyncio.sleep(0.005)
        child = pool.models["a"].child
        assert child is not None
        child.die()  # type: ignore[attr-defined]
        with pytest.raises(ApiError, match="its process has ended"):
            await waiting

    run(check, "a", switch_s=0.05)


def test_idle_models_sleep_and_wake() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        await use(pool, "a")
        await asyncio.sleep(0.3)
        assert pool.models["a"].state is State.ASLEEP and pool.held_bytes == 10
        await use(pool, "a")
        assert switches.log == ["start a", "sleep a", "wake a"]

    run(check, "a", idle_s=0.1)


def test_a_model_that_cannot_sleep_is_stopped() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        switches.no_sleep.add("a")
        await use(pool, "a")
        await pool.put_to_sleep(pool.models["a"])
        assert pool.models["a"].state is State.STOPPED

    run(check, "a")


def test_clients_that_leave_hold_nothing() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        for patience_s in (0.0, 0.002, 0.01, 0.0105, 0.02, 0.05):
            waiting = asyncio.create_task(use(pool, "a"))
            await asyncio.sleep(patience_s)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert pool.num_waiting == 0 and pool.num_running == 0
        await use(pool, "b")
        assert pool.num_running == 0

    run(check, "a", "b", budget=100)


def test_a_model_larger_than_the_budget_runs_alone() -> None:
    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        await use(pool, "a")
        await use(pool, "b")
        assert switches.log == ["start a", "stop a", "start b"]

    run(check, "a", "b", budget=50)


@pytest.mark.parametrize("seed", range(4))
def test_random_load_loses_nothing_and_keeps_the_budget(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TURN_S", 0.02)
    names, rng = "abcde", random.Random(seed)

    async def check(pool: ModelPool, switches: FakeSwitches) -> None:
        async def client(name: str, after_s: float, seconds: float) -> None:
            await asyncio.sleep(after_s)
            await use(pool, name, seconds)
            assert pool.held_bytes <= pool.budget_bytes

        draws = [(rng.choice(names), rng.random(), rng.random() * 0.02) for _ in range(200)]
        await asyncio.gather(*(client(*draw) for draw in draws))
        waited = sum(model.wait_s.count for model in pool.models.values())
        assert waited <= 200 and not any(model.refused for model in pool.models.values())

    budget = rng.choice((200, 215, 260))
    run(check, *names, budget=budget, idle_s=0.2, max_waiting=200)
