"""Every exchange gives every rank the columns of all ranks."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.slots import NUM_SLOTS, BufferTooLarge
from serve.group.exchange.windows import _HEAD, WindowExchange
from tests.support.group.exchange_groups import (
    ROW_BYTES,
    ROWS,
    arena_group,
    gloo_group,
    window_group,
)
from tests.support.profile import examples
from tests.support.transport.transport_rig import PATIENCE_S
from transport.arena import Aborted, Arena, ExchangeError, RankMissing
from transport.base import Segment

KINDS = ["arena", "inproc", "shm", "tcp", "group"]
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


Make = Callable[..., list[Any]]


@pytest.fixture
def made(tmp_path) -> Iterator[Make]:
    """Makes a group's exchanges, and closes them in the end."""
    urls = {"inproc": "inproc://group", "shm": f"shm://{tmp_path}/s", "tcp": "tcp://127.0.0.1:0"}
    with ExitStack() as undo:

        def make(kind: str, size: int, deadline_s: float = PATIENCE_S) -> list[Any]:
            if kind == "arena":
                group: list[Any] = arena_group(size, deadline_s)
            elif kind == "group":
                group = gloo_group(size)
            else:
                group = window_group(urls[kind], size, deadline_s)
            for exchange in group:
                undo.callback(exchange.close)
            return group

        yield make


def at_once(work: Callable[[Any], Any], group: Sequence[Any]) -> list[Any]:
    """Returns each rank's result, or its ExchangeError."""

    def caught(exchange: Any) -> Any:
        try:
            return work(exchange)
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(caught, group))


def gathered(exchange: Any, full: Tensor, bounds: Sequence[int]) -> Tensor:
    """Writes own columns of a tensor, and returns what the exchange makes of them."""
    buffer = exchange.begin(*full.shape, full.dtype)
    assert buffer.shape == full.shape and buffer.dtype == full.dtype
    own = slice(bounds[exchange.rank], bounds[exchange.rank + 1])
    buffer[:, own] = full[:, own]
    exchange.complete(buffer, bounds)
    return buffer


def values(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    whole = torch.randint(-128, 128, (rows, columns), generator=source, dtype=torch.int8)
    return whole.to(dtype)


# ---- the same tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_have_all_columns(made, kind, dtype):
    group = made(kind, 3)
    cases = [
        (1, [0, 64, 128, 192]),
        (ROWS, [0, 7, 300, 1000]),
        (3, [0, 0, 5, 5]),  # ranks without columns
        (0, [0, 7, 300, 1000]),
        (5, [0, 0, 0, 0]),
        (17, [0, 1, 2, 3]),
        (2, [0, 1024, 1024, 1024]),
    ]
    expected = [values(rows, bounds[-1], dtype, i) for i, (rows, bounds) in enumerate(cases)]

    def work(exchange: Any) -> list[Tensor]:
        return [
            gathered(exchange, full, bounds).clone()
            for full, (_, bounds) in zip(expected, cases, strict=True)
        ]

    for found in at_once(work, group):
        for mine, full in zip(found, expected, strict=True):
            assert torch.equal(mine, full)
    assert [exchange.num_completed for exchange in group] == [len(cases)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_outlives_seven_further_ones(made, kind):
    group = made(kind, 2)
    expected = [values(4, 100, torch.float32, i) for i in range(NUM_SLOTS)]

    def work(exchange: Any) -> list[Tensor]:
        gathered(exchange, values(ROWS, 100, torch.int8, 9), [0, 50, 100])
        return [gathered(exchange, full, [0, 30, 100]) for full in expected]

    for found in at_once(work, group):
        assert all(torch.equal(mine, full) for mine, full in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["arena", "inproc"])
@examples(100)
@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, ROWS),
            st.lists(st.integers(0, ROW_BYTES // 12), min_size=3, max_size=3),
            st.sampled_from(DTYPES),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_sizes(kind, calls):
    group = (
        arena_group(3, PATIENCE_S)
        if kind == "arena"
        else window_group("inproc://sizes", 3, PATIENCE_S)
    )

    def work(exchange: Any) -> bool:
        same = []
        for rows, widths, dtype in calls:
            bounds = [0, widths[0], widths[0] + widths[1], sum(widths)]
            full = values(rows, bounds[-1], dtype, rows)
            same.append(torch.equal(gathered(exchange, full, bounds), full))
        return all(same)

    assert at_once(work, group) == [True] * 3
    for exchange in group:
        exchange.close()


def test_one_rank_is_alone(made):
    for kind in ("arena", "inproc", "group"):
        (exchange,) = made(kind, 1)
        full = values(2, 10, torch.float32)
        assert torch.equal(gathered(exchange, full, [0, 10]), full)


# ---- slots


def test_slots_are_the_same_sequence_on_all_ranks(made):
    group = made("arena", 3)
    sizes = [(1, 8), (ROWS, 1024), (1, 8), (5, 100), (2, 8), (ROWS, 1024)] * 5
    offsets = [
        [exchange.begin(*size, torch.float32).data_ptr() for size in sizes] for exchange in group
    ]
    places = [[at - min(found) for at in found] for found in offsets]
    assert places[0] == places[1] == places[2]


def test_no_two_live_slots_overlap(made):
    exchange = made("arena", 1)[0]
    sizes = [(1, 8), (ROWS, 1024), (3, 1000), (ROWS, 1000), (20, 700), (0, 5), (5, 1), (1, 1024)]
    buffers = [exchange.begin(*size, torch.float32) for size in sizes * 8]
    for first in range(len(buffers) - NUM_SLOTS):
        spans = [
            (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
            for buffer in buffers[first : first + NUM_SLOTS]
            if buffer.numel()
        ]
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_results_of_decode_steps_use_little_memory(made):
    exchange = made("arena", 1)[0]
    addresses = {exchange.begin(1, 1024, torch.float32).data_ptr() for _ in range(50)}
    assert len(addresses) == NUM_SLOTS and max(addresses) - min(addresses) < NUM_SLOTS * 4096


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_is_refused(made, kind):
    exchange = made(kind, 2)[0]
    exchange.begin(ROWS, ROW_BYTES // 4, torch.float32)
    exchange.begin(1, ROWS * ROW_BYTES // 4, torch.float32)
    with pytest.raises(BufferTooLarge, match=r"41 rows of 4096 bytes; .* 40 rows of 4096 bytes"):
        exchange.begin(ROWS + 1, ROW_BYTES // 4, torch.float32)


def test_an_arena_that_is_too_small_is_refused():
    arena = Arena.create(1 << 20, 2, rank=0)
    with pytest.raises(BufferTooLarge, match="need a memory of"):
        ArenaExchange(arena, ROWS, ROW_BYTES)
    arena.close()


@pytest.mark.parametrize("bounds", [[0, 4], [0, 4, 9], [1, 4, 8], [0, 9, 8], [0, 4, 8, 8]])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_that_do_not_divide_the_columns(made, kind, bounds):
    exchange = made(kind, 2)[0]
    buffer = exchange.begin(1, 8, torch.int8)
    with pytest.raises(ValueError, match="bounds"):
        exchange.complete(buffer, bounds)


def test_connections_to_the_wrong_ranks():
    with pytest.raises(ValueError, match=r"rank 1 has connections to \[1\]"):
        WindowExchange(1, {1: None}, 1, 1)  # type: ignore[dict-item]


# ---- ranks that are missing


@pytest.mark.parametrize("kind", ["arena", "inproc", "shm", "tcp"])
def test_a_missing_rank_is_named(made, kind):
    group = made(kind, 3, deadline_s=0.4)
    full = values(2, 6, torch.float32)
    found = at_once(lambda exchange: gathered(exchange, full, [0, 2, 4, 6]), group[:2])
    assert all(isinstance(error, RankMissing) and error.rank == 2 for error in found)
    assert group[0].waited_s >= 0.4 and group[0].num_completed == 0
    with pytest.raises(Aborted):
        gathered(group[0], full, [0, 2, 4, 6])


@pytest.mark.parametrize("kind", ["inproc", "shm", "tcp"])
def test_a_lost_rank_is_named_before_the_deadline(made, kind):
    group = made(kind, 2)
    threading.Timer(0.05, group[1].close).start()
    began = time.monotonic()
    with pytest.raises(RankMissing, match="rank 1 is missing"):
        gathered(group[0], values(2, 6, torch.float32), [0, 2, 6])
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize("kind", ["arena", "inproc"])
def test_an_abort_and_a_new_generation(made, kind):
    group = made(kind, 2)
    full, bounds = values(3, 100, torch.float32), [0, 40, 100]
    threading.Timer(0.05, group[0].abort).start()
    (error,) = at_once(lambda exchange: gathered(exchange, full, bounds), group[:1])
    assert isinstance(error, Aborted)
    if kind == "arena":
        group[1]._arena.reset(1)

    def work(exchange: Any) -> Tensor:
        exchange.join(1)
        return gathered(exchange, full, bounds)

    # A message that rank 0 sent before the abort still lies in rank 1's window.
    assert all(torch.equal(found, full) for found in at_once(work, group))


def test_a_generation_that_is_not_later(made):
    exchange = made("inproc", 1)[0]
    exchange.join(1)
    with pytest.raises(ValueError, match="generation 1 follows 1"):
        exchange.join(1)


def post_head(exchange: WindowExchange, *head: int, payload: bytes = b"") -> None:
    data = bytearray(_HEAD.pack(*head) + payload)
    raw = (ctypes.c_char * len(data)).from_buffer(data)
    endpoint = exchange._endpoints[0]
    endpoint.post([Segment(ctypes.addressof(raw), 1, len(data), len(data))])


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        ((0, 0, 1, 0, 1, 2, 4), bytes(8)),  # another rank's name
        ((0, 1, 2, 0, 1, 2, 4), bytes(8)),  # a number ahead
        ((0, 1, 1, 1, 1, 2, 4), bytes(8)),  # a row ahead
        ((0, 1, 1, 0, 1, 1, 4), bytes(12)),  # other columns
        ((0, 1, 1, 0, 3, 2, 4), bytes(24)),  # more rows than there are
        ((0, 1, 1, 0, 1, 2, 4), bytes(7)),  # bytes are missing
        ((0, 1, 1, 0, 0, 2, 4), b""),  # no rows
    ],
)
def test_a_message_that_is_not_due(made, head, payload):
    group = made("inproc", 2)
    post_head(group[1], *head, payload=payload)
    with pytest.raises(ExchangeError, match="was due"):
        gathered(group[0], values(2, 4, torch.float32), [0, 2, 4])


def test_a_message_of_a_later_generation(made):
    group = made("inproc", 2)
    post_head(group[1], 1, 1, 1, 0, 1, 2, 4, payload=bytes(8))
    with pytest.raises(Aborted, match="rank 1 is in generation 1, not 0"):
        gathered(group[0], values(2, 4, torch.float32), [0, 2, 4])


# ---- groups of devices


def test_a_failure_of_the_group_is_an_exchange_error(made, monkeypatch):
    (exchange,) = made("group", 1)

    def fail(*_: object) -> None:
        raise RuntimeError("NCCL: remote error")

    monkeypatch.setattr(exchange, "_gather", fail)
    with pytest.raises(ExchangeError, match="remote error"):
        gathered(exchange, values(1, 1, torch.int8), [0, 1])
