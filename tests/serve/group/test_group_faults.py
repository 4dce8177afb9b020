"""Faults of a group's ranks: no request fails that is not at fault, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.cpu import native_library
from ops.sharded import LateExchange
from serve import LLM, Engine, SamplingParams
from serve.errors import MergestepError
from serve.group.rank import Rank
from serve.group.worker import Worker
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import token_ids
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from transport.base import PeerLostError

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
SETTINGS = {
    "dtype": "int8",
    "max_model_len": 140,
    "max_num_seqs": 8,
    "max_chunk_tokens": 16,
    "kv_page_bytes": 4096,
    "kv_cache_bytes": 1 << 20,
    "speculation": "off",  # calls are counted
}
GRIDS = [(2, 1), (1, 2), (2, 2)]
RANKS = [(grid, rank) for grid in GRIDS for rank in range(grid[0] * grid[1])]


def prompts() -> list[list[int]]:
    return [token_ids(length, seed=length) for length in (3, 40, 9, 25)]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=24 + number,
            temperature=0.9 if number % 2 else 0.0,
            seed=number,
            ignore_eos=True,
            logprobs=1,
        )
        for number in range(len(prompts()))
    ]


def outputs(llm: LLM) -> list[object]:
    found = llm.generate(prompts(), params(), use_tqdm=False)
    return [(r.outputs[0].token_ids, r.outputs[0].cumulative_logprob) for r in found]


@functools.cache
def alone() -> list[object]:
    """Returns what one process answers."""
    with LLM(str(checkpoint("llama", "base")), **SETTINGS) as llm:
        return outputs(llm)


@contextlib.contextmanager
def group_of(grid: tuple[int, int], **settings: object) -> Iterator[LLM]:
    path = str(checkpoint("llama", "base"))
    with LLM(
        path,
        tensor_parallel_size=grid[0],
        pipeline_parallel_size=grid[1],
        **SETTINGS | settings,
    ) as llm:
        yield llm
        assert llm.stats().pages_in_use == 0


class Faults:
    """Makes one call of a method of a rank fail, in a step of several sequences: the engine takes
    the only sequence of a step that fails for the one at fault."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_raised = 0
        self._patch = monkeypatch.setattr
        self._here = threading.local()  # a thread's rank, and how many sequences its step has
        self._lock = threading.Lock()
        self._left: int | None = None  # calls before the one that fails
        self._rank, self._is_late = 0, False
        here, forward = self._here, Rank.forward

        def noted(this, step, hidden):
            here.rank, here.count = this.number, len(step.attention.kv_lens)
            return forward(this, step, hidden)

        self._patch(Rank, "forward", noted)

    def of(self, owner: type, name: str) -> None:
        """Chooses the method."""
        original = getattr(owner, name)

        def failing(*arguments):
            if name == "forward":
                self._here.rank, step = arguments[0].number, arguments[1]
                self._here.count = len(step.attention.kv_lens)
            is_due = self._is_due()
            if is_due and not self._is_late:
                raise RuntimeError("injected")
            result = original(*arguments)
            if is_due:
                raise RuntimeError("injected")
            return result

        self._patch(owner, name, failing)

    def _is_due(self) -> bool:
        here = self._here
        with self._lock:
            if self._left is None or here.rank != self._rank or here.count < 2:
                return False
            self._left -= 1
            if self._left >= 0:
                return False
            self._left = None
            self.num_raised += 1
            return True

    def arm(self, number: int, rank: int, *, is_late: bool = False) -> None:
        """number: of the call that fails. is_late: it fails after its work."""
        self._rank, self._is_late, self._left = rank, is_late, number


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def started(thread_workers) -> int:  # noqa: F811
    return thread_workers[0].num_started


@pytest.mark.covering(1)
@pytest.mark.parametrize(("grid", "rank"), RANKS, ids=str)
def test_a_step_that_fails_once_is_computed_again(thread_workers, faults, grid, rank):  # noqa: F811
    """Before the rank's layers, and after them; workers keep their weights and connections."""
    faults.of(Rank, "forward")
    with group_of(grid) as llm:
        for number, is_late in ((0, False), (3, True), (7, False)):
            faults.arm(number, rank, is_late=is_late)
            assert outputs(llm) == alone()
        assert llm.stats().recomputed_sequences == 0
        assert started(thread_workers) == grid[0] * grid[1] - 1
    assert faults.num_raised == 3


@pytest.mark.covering(1)
@pytest.mark.parametrize(("grid", "rank"), [each for each in RANKS if each[0][0] > 1], ids=str)
def test_a_fault_between_two_results(thread_workers, faults, grid, rank):  # noqa: F811
    """The other tensor ranks wait in a barrier. It may be that of the logits."""
    faults.of(LateExchange, "begin")
    with group_of(grid) as llm:
        for number in (1, 5, 30, 51):
            faults.arm(number, rank)
            assert outputs(llm) == alone()
        assert started(thread_workers) == grid[0] * grid[1] - 1
    assert faults.num_raised == 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_logits(thread_workers, faults, grid, rank):  # noqa: F811
    faults.of(Rank, "head")
    with group_of(grid) as llm:
        for number, is_late in ((0, False), (2, True)):
            faults.arm(number, rank, is_late=is_late)
            assert outputs(llm) == alone()
        assert outputs(llm) == alone()
        assert started(thread_workers) == grid[0] * grid[1] - 1
    assert faults.num_raised == 2


@pytest.mark.parametrize(("grid", "rank"), RANKS, ids=str)
def test_only_the_request_at_fault_ends(thread_workers, monkeypatch, grid, rank):  # noqa: F811
    forward = Rank.forward
    seen = {token for prompt in prompts() for token in prompt}
    seen |= {token for tokens, _ in alone() for token in tokens}
    poison = min(set(range(2, 300)) - seen)

    def poisoned(this, step, hidden):
        if this.number == rank and poison in step.input_ids:
            raise RuntimeError("injected")
        return forward(this, step, hidden)

    monkeypatch.setattr(Rank, "forward", poisoned)
    with group_of(grid) as llm:
        more = [*prompts(), [5, 6, poison, 7]]
        found = llm.generate(more, [*params(), params()[0]], use_tqdm=False)
        reasons = [r.outputs[0].finish_reason for r in found]
        assert reasons == ["length"] * len(prompts()) + ["error"]
        assert [r.outputs[0].token_ids for r in found[:-1]] == [one[0] for one in alone()]
        assert started(thread_workers) == grid[0] * grid[1] - 1


@pytest.mark.covering(1)
@pytest.mark.parametrize(("grid", "rank"), [each for each in RANKS if each[1] > 0], ids=str)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_lost_worker_is_replaced(thread_workers, monkeypatch, grid, rank, is_late):  # noqa: F811
    """A worker's connection closes at a step, before or after its work."""
    left, step = [1000], Worker._step

    def closing(this, message):
        is_this = this is thread_workers[0].workers[rank]
        left[0] -= is_this
        is_due = is_this and left[0] == 0
        if not is_due or is_late:
            step(this, message)
        if is_due:
            raise PeerLostError("injected")

    monkeypatch.setattr(Worker, "_step", closing)
    with group_of(grid) as llm:
        for number in (1, 6):
            left[0] = number
            assert outputs(llm) == alone()
        assert outputs(llm) == alone()
        assert llm.stats().recomputed_sequences > 0
        assert started(thread_workers) == grid[0] * grid[1] + 1


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_a_worker_lost_while_idle_is_replaced(thread_workers, monkeypatch, grid):  # noqa: F811
    """Memory that is given back meanwhile has edits, which cannot be sent any more."""
    with group_of(grid) as llm:
        assert outputs(llm) == alone()
        thread_workers[0].workers[1]._engine.close()
        assert outputs(llm) == alone()
        assert started(thread_workers) == grid[0] * grid[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_cannot_be_edited_is_made_anew(thread_workers, monkeypatch, rank):  # noqa: F811
    """As where Linux has no more maps. A worker then ends; the engine forms the group again."""
    left, edit = [1000], Rank.edit

    def failing(this, edits):
        if this.number == rank and len(edits):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(12, "injected")
        edit(this, edits)

    monkeypatch.setattr(Rank, "edit", failing)
    with group_of((1, 2)) as llm:
        left[0] = 3
        assert outputs(llm) == alone()
        assert llm.stats().recomputed_sequences > 0
        assert started(thread_workers) == 1 + rank
    assert left[0] <= 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_requests_end_while_steps_are_in_flight(thread_workers, grid):  # noqa: F811
    """Aborts at several moments; the others' tokens stay, and all memory comes back."""

    async def run() -> None:
        settings = SETTINGS | {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
        async with Engine(str(checkpoint("llama", "base")), **settings) as engine:
            for count in (1, 3, 8):
                asked = [
                    engine.submit(prompt, each)
                    for prompt, each in zip(prompts() * 2, params() * 2, strict=True)
                ]
                kept = [asyncio.create_task(engine.collect(each)) for each in asked[:4]]
                for stream in asked[4:]:
                    await _read_and_leave(stream, count)
                found = [(await each).outputs[0].token_ids for each in kept]
                assert found == [one[0] for one in alone()]
            while engine.stats().num_unfinished:
                await asyncio.sleep(0.01)
            assert engine.stats().pages_in_use == 0

    asyncio.run(run())


async def _read_and_leave(stream, count: int) -> None:
    async for _ in stream:
        count -= 1
        if count == 0:
            break
    stream.abort()


def held() -> dict[str, int]:
    """Returns what this process holds that a group might leave behind."""
    files = [os.readlink(f"/proc/self/fd/{each}") for each in _open_files()]
    return {
        "memory files": sum("memfd" in each for each in files),
        "sockets": sum(each.startswith("socket:") for each in files),
        "folders": len(list(Path(tempfile.gettempdir()).glob("mergestep-group-*"))),
        "shared memory": sum(each.is_file() for each in os.scandir("/dev/shm")),
        "threads": sum(
            each.name.startswith(("mergestep", "rank-")) for each in threading.enumerate()
        ),
    }


def _open_files() -> list[str]:
    return [each for each in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{each}").exists()]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_worker_that_cannot_load_fails_the_start(thread_workers, monkeypatch, grid):  # noqa: F811
    # a folder of its own, with a short name for sockets: other tests run groups at the same time
    own = tempfile.TemporaryDirectory(prefix="g-")
    monkeypatch.setattr(tempfile, "tempdir", own.name)
    alone()  # modules and their threads are there
    before = held()
    load = Worker._loaded

    def failing(this, content):
        if content["rank"] == grid[0] * grid[1] - 1:
            raise MemoryError("no room")
        return load(this, content)

    monkeypatch.setattr(Worker, "_loaded", failing)
    with pytest.raises(MergestepError, match=r"rank \d: MemoryError: no room"), group_of(grid):
        pass
    gc.collect()
    assert held() == before
    own.cleanup()
