"""Ranks that share memory and wait for each other, also where some of them die."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transport.arena_rank import PATIENCE_S, add_up, next_line, started
from transport import _windows
from transport.arena import Aborted, Arena, ArenaMismatch, ExchangeError, RankMissing

PAGE = 4096


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    """Three ranks' mappings of one arena in this process."""
    first = Arena.create(2 * PAGE, 3, rank=0)
    made = [first, Arena.open(first.fd, 1), Arena.open(first.path, 2)]
    yield made
    for arena in made:
        arena.close()


def at_once(work: Callable[[Arena], object], arenas: list[Arena]) -> list[object]:
    """Returns each rank's result, or its ExchangeError."""

    def caught(arena: Arena) -> object:
        try:
            return work(arena)
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(arenas)) as pool:
        return list(pool.map(caught, arenas))


# ---- files


def test_all_ranks_see_the_same_bytes(arenas):
    arenas[1].data[5000:5003] = b"abc"
    assert all(arena.data[5000:5003] == b"abc" for arena in arenas)
    assert {(arena.num_bytes, arena.num_ranks) for arena in arenas} == {(2 * PAGE, 3)}


def test_a_size_is_rounded_up_to_pages():
    arena = Arena.create(PAGE + 1, 1)
    assert arena.num_bytes == len(arena.data) == 2 * PAGE
    arena.close()


def test_data_stays_mapped_while_a_view_of_it_is_left(arenas):
    view = memoryview(arenas[0].data)
    arenas[0].close()
    arenas[0].close()
    view[0] = 7
    assert arenas[1].data[0] == 7
    with pytest.raises(ExchangeError, match="closed"):
        _ = arenas[0].path


def sealed(data: bytes, size: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def head_of(arena: Arena) -> bytes:
    return os.pread(arena.fd, 24, 0)


@pytest.mark.parametrize(
    ("at", "size", "reason"),
    [(0, 3 * PAGE, "magic"), (8, 3 * PAGE, "version"), (12, 3 * PAGE, "size"),
     (16, 3 * PAGE, "size"), (None, 4 * PAGE, "size"), (None, 100, "small")],
)  # fmt: skip
def test_a_file_that_is_no_arena(arenas, at, size, reason):
    head = bytearray(head_of(arenas[0]))
    if at is not None:
        head[at] ^= 0xFF
    fd = sealed(bytes(head), size)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArenaMismatch, match=reason):
        Arena.open(fd, 0)
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(fd)


def test_a_file_that_is_not_sealed(tmp_path, arenas):
    path = tmp_path / "arena"
    path.write_bytes(head_of(arenas[0]) + bytes(3 * PAGE - 24))
    with pytest.raises(ArenaMismatch, match="sealed"):
        Arena.open(path, 0)
    with pytest.raises(FileNotFoundError):
        Arena.open(tmp_path / "none", 0)


@pytest.mark.parametrize("rank", [3, 62, -2])
def test_a_rank_that_is_not_there(arenas, rank):
    with pytest.raises(ArenaMismatch, match=f"rank {rank} of an arena of 3"):
        Arena.open(arenas[0].fd, rank)


@pytest.mark.parametrize("num_ranks", [0, 63])
def test_an_impossible_number_of_ranks(num_ranks):
    with pytest.raises(ArenaMismatch, match="num_ranks"):
        Arena.create(PAGE, num_ranks)


def test_the_file_cannot_shrink(arenas):
    with pytest.raises(PermissionError):
        os.ftruncate(arenas[0].fd, PAGE)


# ---- barriers


def test_one_rank_waits_for_nobody():
    arena = Arena.create(1, 1, rank=0)
    for _ in range(10):
        arena.barrier(0.0)
    assert arena.num_barriers == 10 and arena.waited_s < 1.0
    arena.close()


@pytest.mark.parametrize("spin_s", [0.0, 20e-6])
def test_what_was_written_before_a_barrier_is_seen_after_it(arenas, spin_s):
    expected = str(sum(range(1000)) * 6)

    def sums(arena: Arena) -> str:
        words, total = memoryview(arena.data).cast("Q"), 0
        for step in range(1000):
            row = step % 2 * 3
            words[row + arena.rank] = step * (arena.rank + 1)
            arena.barrier(PATIENCE_S)
            total += sum(words[row : row + 3])
        return str(total)

    for arena in arenas:
        arena.spin_s = spin_s
    assert at_once(sums, arenas) == [expected] * 3
    assert [arena.num_barriers for arena in arenas] == [1000] * 3


@given(parts=st.lists(st.binary(max_size=600), min_size=1, max_size=5))
def test_parts_of_any_size_are_gathered(parts):
    first = Arena.create(PAGE, len(parts), rank=0)
    arenas = [first, *(Arena.open(first.fd, rank) for rank in range(1, len(parts)))]
    ends = [sum(map(len, parts[: rank + 1])) for rank in range(len(parts))]

    def gather(arena: Arena) -> bytes:
        arena.data[ends[arena.rank] - len(parts[arena.rank]) : ends[arena.rank]] = parts[arena.rank]
        arena.barrier(PATIENCE_S)
        return arena.data[: ends[-1]]

    assert at_once(gather, arenas) == [b"".join(parts)] * len(parts)
    for arena in arenas:
        arena.close()


def test_missing_ranks_are_named(arenas):
    began = time.monotonic()
    with pytest.raises(RankMissing, match=r"ranks \[0, 2\] are missing after 0.050 s") as caught:
        arenas[1].barrier(0.05)
    assert time.monotonic() - began >= 0.05 and arenas[1].waited_s >= 0.05
    assert (caught.value.rank, caught.value.ranks, caught.value.waited_s) == (0, (0, 2), 0.05)
    assert arenas[1].num_barriers == 0


def test_a_rank_that_gave_up_passes_no_barrier_until_a_new_generation(arenas):
    """Otherwise it would be one barrier behind the others."""
    with pytest.raises(RankMissing):
        arenas[0].barrier(0.0)
    with pytest.raises(Aborted, match="rank 0 has left generation 0"):
        arenas[0].barrier(0.0)
    with pytest.raises(Aborted):
        arenas[0].join(0)
    arenas[0].reset(1)
    assert at_once(lambda arena: arena.join(1), arenas) == [None] * 3
    assert at_once(lambda arena: arena.barrier(PATIENCE_S), arenas) == [None] * 3


def test_an_abort_ends_waits_and_later_barriers_at_once(arenas):
    threading.Timer(0.05, arenas[2].abort).start()
    began = time.monotonic()
    found = at_once(lambda arena: arena.barrier(PATIENCE_S), arenas[:2])
    assert all(isinstance(error, Aborted) for error in found) and arenas[0].is_aborted
    assert time.monotonic() - began < PATIENCE_S / 2
    with pytest.raises(Aborted, match="generation 0 is aborted"):
        arenas[2].barrier(PATIENCE_S)


def test_a_reset_ends_waits_of_the_generation_before(arenas):
    threading.Timer(0.05, arenas[2].reset, [7]).start()
    (error,) = at_once(lambda arena: arena.barrier(PATIENCE_S), arenas[:1])
    assert isinstance(error, Aborted) and "generation 0 is over; it is 7" in str(error)
    with pytest.raises(ValueError, match="7 is not new"):
        arenas[2].reset(7)


def test_counts_begin_at_zero_in_a_new_generation(arenas):
    for _ in range(3):
        at_once(lambda arena: arena.barrier(PATIENCE_S), arenas)
    arenas[0].abort()
    arenas[0].reset(1)
    arenas[0].join(1)
    with pytest.raises(RankMissing) as caught:
        arenas[0].barrier(0.02)
    assert caught.value.ranks == (1, 2), "their counts were those of the generation before"


def test_an_abort_of_an_old_generation_changes_nothing(arenas):
    arenas[0].reset(1)
    arenas[1].abort()  # knows generation 0
    assert not arenas[0].is_aborted


def test_a_successor_is_not_disturbed_by_a_rank_that_wakes_up_late(arenas):
    successor = Arena.open(arenas[0].fd, 2)
    arenas[1].reset(1)
    everyone = [arenas[0], arenas[1], successor]
    at_once(lambda arena: arena.join(1), everyone)
    with pytest.raises(Aborted):
        arenas[2].barrier(PATIENCE_S)
    arenas[2].join(1)  # it is told, but has a successor
    assert at_once(lambda arena: arena.barrier(PATIENCE_S), everyone) == [None] * 3
    with pytest.raises(Aborted, match=r"rank 2 .* has a successor"):
        arenas[2].barrier(PATIENCE_S)
    successor.close()


def test_without_a_rank_there_is_no_barrier(arenas):
    observer = Arena.open(arenas[0].fd, -1)
    with pytest.raises(Aborted, match="no rank"):
        observer.barrier(0.0)
    observer.abort()
    assert arenas[0].is_aborted
    observer.close()


def test_a_signal_handler_runs_while_a_rank_waits(arenas):
    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1])
    timer.start()
    try:
        with pytest.raises(InterruptedError):
            arenas[0].barrier(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
        timer.join()
    with pytest.raises(Aborted):
        arenas[0].barrier(0.0)


def test_a_wake_up_that_never_comes_costs_one_slice(arenas):
    """A rank died after it had arrived and before it woke the others."""
    first = Arena.create(PAGE, 2, rank=0)
    threading.Timer(0.1, arrive_without_waking, [first, 1]).start()
    first.barrier(PATIENCE_S)
    assert 0.05 < first.waited_s < PATIENCE_S / 2
    first.close()


def pass_barriers(arena: Arena) -> None:
    while True:
        arena.barrier(0.5)


def arrive_without_waking(arena: Arena, rank: int) -> None:
    control = mmap.mmap(arena.fd, _windows.ARENA_DATA_AT)
    line = ctypes.c_uint64.from_buffer(control, 128 + 64 * rank)
    line.value = 1


# ---- processes


@pytest.mark.process
def test_sums_of_three_processes():
    arena = Arena.create(PAGE, 3, rank=0)
    with started(arena, 1, "sums") as one, started(arena, 2, "sums") as two:
        assert next_line(one) == next_line(two) == "open"
        add_up(arena, 0)
        assert next_line(one) == next_line(two) == str(sum(range(1000)) * 6)
    arena.close()


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_among_barriers_is_named(how):
    arena = Arena.create(PAGE, 2, rank=0)
    with started(arena, 1, "barriers") as process:
        assert next_line(process) == "open"
        threading.Timer(0.1, process.send_signal, [how]).start()
        with pytest.raises(RankMissing, match="rank 1 is missing") as caught:
            pass_barriers(arena)
        assert caught.value.ranks == (1,) and arena.num_barriers > 0
    arena.close()


@pytest.mark.process
def test_a_group_goes_on_with_a_successor_of_a_dead_rank():
    arena = Arena.create(PAGE, 3, rank=0)
    with started(arena, 1, "generations") as survivor:
        with started(arena, 2, "generations") as victim:
            for process in (survivor, victim):
                assert next_line(process) == "open"
                tell(process, 0)
            arena.barrier(PATIENCE_S)
            assert next_line(survivor) == next_line(victim) == "passed"
            victim.kill()  # while it waits in the next barrier
            victim.wait()
        arena.abort()
        assert next_line(survivor) == "Aborted"
        arena.reset(1)
        arena.join(1)
        with started(arena, 2, "generations") as successor:
            assert next_line(successor) == "open"
            tell(successor, 1)
            tell(survivor, 1)
            for _ in range(5):
                arena.barrier(PATIENCE_S)
            assert [next_line(survivor) for _ in range(5)] == ["passed"] * 5
            assert next_line(successor) == "passed"
    arena.close()


def tell(process, generation: int) -> None:
    process.stdin.write(f"{generation}\n")
    process.stdin.flush()
