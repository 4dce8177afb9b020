"""Devices that exchange by a process group: the group ends with its generation, on all ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from serve.group.exchange import direct
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.direct import DirectExchange, group_opener
from serve.group.exchange.slots import ring_bytes
from tests.support.transport.transport_rig import PATIENCE_S
from transport.arena import Aborted, Arena, ExchangeError, RankMissing

CPU = torch.device("cpu")
LARGEST = 4096
Make = Callable[..., list[DirectExchange]]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes the exchanges of two ranks, which are closed in the end."""
    with ExitStack() as undo:

        def make(
            openers: Any = None, wait: Callable[[], None] = lambda: None, deadline_s: float = 5.0
        ) -> list[DirectExchange]:
            arena = Arena.create(ring_bytes(1, LARGEST), 2, rank=0)
            meeting = os.memfd_create("meeting")
            undo.callback(os.close, meeting)
            path = f"/proc/{os.getpid()}/fd/{meeting}"
            found = []
            for rank, each in enumerate((arena, Arena.open(arena.fd, 1))):
                opener = group_opener(path, CPU, rank, 2, deadline_s / 4)
                opener = opener if openers is None else openers[rank] or opener
                inner = ArenaExchange(each, 1, LARGEST, deadline_s)
                found.append(DirectExchange(inner, CPU, wait, opener, LARGEST, deadline_s))
                undo.callback(found[-1].close)
            return found

        yield make


def gathered(exchange: DirectExchange, seed: int) -> bool:
    """Exchanges three columns of seven, and the others'; returns whether all are right."""
    expected = torch.arange(seed, seed + 28, dtype=torch.float32).view(4, 7)
    buffer, bounds = exchange.begin(4, 7, torch.float32), [0, 3, 7]
    own = slice(bounds[exchange.rank], bounds[exchange.rank + 1])
    buffer[:, own] = expected[:, own]
    exchange.complete(buffer, bounds)
    exchange.settle()
    return torch.equal(buffer, expected)


def at_once(work: Callable[[DirectExchange], Any], ranks: list[DirectExchange]) -> list[Any]:
    """Returns each rank's result, or its ExchangeError."""

    def caught(exchange: DirectExchange) -> Any:
        try:
            return work(exchange)
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def begin_anew(ranks: list[DirectExchange], generation: int) -> None:
    ranks[0]._inner._arena.reset(generation)
    for each in ranks:
        each.join(generation)


def test_every_generation_has_a_group_of_its_own(made, caplog):
    ranks = made()
    for generation in (1, 2, 3):
        begin_anew(ranks, generation)
        found = at_once(lambda each: [gathered(each, seed) for seed in range(20)], ranks)
        assert found == [[True] * 20] * 2
    assert [each.num_completed for each in ranks] == [60, 60]
    assert not caplog.records


def test_a_rank_that_gives_up_ends_the_wait_of_the_others(made):
    ranks = made()
    at_once(DirectExchange.prepare, ranks)
    threading.Timer(0.1, ranks[1].abort_group).start()
    began = time.monotonic()
    with pytest.raises(ExchangeError):
        gathered(ranks[0], 0)
    assert time.monotonic() - began < PATIENCE_S / 2
    with pytest.raises(Aborted):  # without a new generation
        gathered(ranks[0], 0)
    begin_anew(ranks, 1)
    assert at_once(lambda each: gathered(each, 1), ranks) == [True, True]


def test_a_missing_rank_is_named_before_a_group_is_made(made):
    ranks = made(openers=[None, None], deadline_s=0.3)
    with pytest.raises(RankMissing, match="rank 1 is missing"):
        ranks[0].prepare()


def test_where_no_group_can_be_made_results_pass_through_the_host(made, caplog):
    def fail(name: str) -> Any:
        raise RuntimeError("no NCCL between these devices")

    ranks = made(openers=[None, fail], deadline_s=4.0)  # the other one waits for a second
    for generation in (1, 2):
        begin_anew(ranks, generation)
        assert at_once(lambda each: gathered(each, 5), ranks) == [True, True]
    texts = [each.getMessage() for each in caplog.records]
    assert len(texts) == 2 and any("no NCCL between these devices" in text for text in texts)
    assert all('group_exchange = "host"' in text for text in texts)


class Device:
    """A device whose kernels wait for ever once it is stuck, until the group's abort."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._ended = threading.Event()
        self.num_aborted = 0

    def wait(self) -> None:
        if self.is_stuck:
            assert self._ended.wait(PATIENCE_S), "nothing ends the kernel"

    def abort(self) -> None:
        self.num_aborted += 1
        self._ended.set()


class FakeExchange:
    """Results of a process group whose kernels are launched and not waited for."""

    def __init__(self, group: Device, *_: object) -> None:
        pass

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=dtype)

    def complete(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["abort", "new generation", "deadline"])
def test_a_kernel_that_waits_for_ever_is_ended(made, monkeypatch, how):
    """By another rank or the engine, of which the arena tells; or by this rank's deadline."""
    device = Device()
    monkeypatch.setattr(direct, "CudaExchange", FakeExchange)
    seconds = 0.5 if how == "deadline" else 5.0
    ranks = made([lambda name: device] * 2, device.wait, seconds)
    at_once(DirectExchange.prepare, ranks)
    device.is_stuck = True
    exchange, other = ranks[0], ranks[1]._inner._arena
    if how == "abort":
        threading.Timer(0.1, other.abort).start()
    elif how == "new generation":
        threading.Timer(0.1, other.reset, [7]).start()
    exchange.complete(exchange.begin(1, 2, torch.int8), [0, 1, 2])
    began = time.monotonic()
    with pytest.raises(Aborted):
        exchange.settle()
    assert time.monotonic() - began < 3.0
    assert device.num_aborted >= 1 and exchange.waited_s > 0.05
