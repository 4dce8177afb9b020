"""Groups whose tensor ranks exchange results over connections, as on several hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from ops.cpu import native_library
from serve import LLM
from serve.group.exchange.windows import WindowExchange
from serve.group.rank import Rank
from tests.serve.group.test_group_engine import SETTINGS, on_grid, outputs, requests
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.exchange_groups import window_group
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.transport.transport_rig import PATIENCE_S
from transport.arena import Aborted

needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
CONNECTED = {"dtype": "int8", "kv_cache_bytes": 1 << 20, "group_exchange": "connections"}
BOUNDS = [0, 2, 4, 6]


@needs_kernels
@pytest.mark.small_pages
@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=str)
def test_ranks_give_the_tokens_of_one(thread_workers, grid):  # noqa: F811
    alone, _ = on_grid("llama", "base", (1, 1), 6, count=4, **CONNECTED)
    found, _ = on_grid("llama", "base", grid, 6, count=4, **CONNECTED)
    assert found == alone


@needs_kernels
@pytest.mark.small_pages
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_step_that_fails_on_any_rank_ends_no_other_request(
    thread_workers,  # noqa: F811
    failing,
    monkeypatch,
):
    """The other ranks of its stage, which wait for it, are told at once; none is taken for lost."""
    compute, num_left, failed = Rank.forward, [5], threading.Event()

    def fail_once(self: Rank, *arguments: object) -> torch.Tensor:
        if self.number == failing:
            num_left[0] -= 1
            if num_left[0] == 0:
                failed.set()
                raise RuntimeError("a fault of the test")
        return compute(self, *arguments)

    alone, _ = on_grid("llama", "base", (1, 1), 7, count=3, **CONNECTED)
    monkeypatch.setattr(Rank, "forward", fail_once)
    began_s = time.monotonic()
    found, _ = on_grid("llama", "base", (2, 2), 7, count=3, **CONNECTED)
    same = [one == other for one, other in zip(found[0], alone[0], strict=True)]
    assert failed.is_set() and sum(same) >= 2 and found[1] == alone[1]
    assert time.monotonic() - began_s < PATIENCE_S
    assert thread_workers[0].num_started == 3


@needs_kernels
@pytest.mark.small_pages
@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_rank_is_replaced(thread_workers, lost):  # noqa: F811
    path, prompts = str(checkpoint("llama", "base")), requests(8, 3, 20)
    settings = SETTINGS | CONNECTED
    with LLM(path, **settings) as llm:
        alone = outputs(llm, *prompts)
    with LLM(path, tensor_parallel_size=2, pipeline_parallel_size=2, **settings) as llm:
        assert outputs(llm, *prompts) == alone
        workers = thread_workers[0]
        survivors = {n: workers.workers[n] for n in (1, 2, 3) if n != lost}
        workers.workers[lost]._engine.close()
        assert outputs(llm, *prompts) == alone
        assert all(workers.workers[n] is worker for n, worker in survivors.items())
    assert workers.num_started == 4


# ---- aborts


@pytest.fixture
def group() -> Iterator[list[WindowExchange]]:
    with ExitStack() as undo:
        made = window_group("inproc://aborts", 3, PATIENCE_S)
        for exchange in made:
            undo.callback(exchange.close)
        yield made


def complete(exchange: WindowExchange) -> torch.Tensor:
    buffer = exchange.begin(1, BOUNDS[-1], torch.float32)
    own = slice(BOUNDS[exchange.rank], BOUNDS[exchange.rank + 1])
    buffer[:, own] = exchange.rank + 1
    exchange.complete(buffer, BOUNDS)
    return buffer.clone()


def aborted(exchange: WindowExchange) -> bool:
    """Aborts as a rank does whose step has failed; returns whether it did."""
    try:
        complete(exchange)
    except Aborted:
        exchange.abort_group()
        return True
    return False


def test_a_rank_that_waits_learns_of_an_abort(group):
    for exchange in group:
        exchange.join(1)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(complete, exchange) for exchange in group[:2]]
        began_s = time.monotonic()
        group[2].abort_group()
        group[2].abort_group()
        for each in waiting:
            with pytest.raises(Aborted, match="rank 2 has aborted generation 1"):
                each.result()
    assert time.monotonic() - began_s < PATIENCE_S / 2
    with pytest.raises(Aborted):
        complete(group[2])


def test_many_aborts_do_not_fill_a_window(group):
    """Messages that an aborted rank never takes are dropped when the next generation begins."""
    for generation in range(1, 40):
        for exchange in group:
            exchange.join(generation)
        group[2].abort_group()
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(aborted, group[:2]))
    for exchange in group:
        exchange.join(40)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(complete, group):
            assert found.tolist() == [[1, 1, 2, 2, 3, 3]]


def test_a_rank_that_joins_late_has_the_messages_of_the_others(group):
    for exchange in group[:2]:
        exchange.join(1)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(complete, exchange) for exchange in group[:2]]
        time.sleep(0.05)  # they post to a rank that still drops what is old
        group[2].join(1)
        assert complete(group[2]).tolist() == [[1, 1, 2, 2, 3, 3]]
        assert all(each.result().tolist() == [[1, 1, 2, 2, 3, 3]] for each in early)
