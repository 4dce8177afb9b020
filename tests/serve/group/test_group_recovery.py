"""Groups that are formed again: losses meanwhile, and workers that do not come back."""

from __future__ import annotations

import threading
import time

import pytest

from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.errors import MergestepError
from serve.group.group import Group
from serve.group.links import messages
from serve.group.worker import Worker
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import ThreadWorkers, thread_workers  # noqa: F401
from transport.base import PeerLostError

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
SETTINGS = {
    "dtype": "int8",
    "max_model_len": 140,
    "max_num_seqs": 8,
    "kv_page_bytes": 4096,
    "kv_cache_bytes": 1 << 20,
}
PROMPTS = [[5, 6, 7], [8, 9], list(range(20, 60))]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def tokens(llm: LLM) -> list[tuple[list[int], str | None]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in found]


def group_of(grid: tuple[int, int], **settings: object) -> LLM:
    return LLM(
        str(checkpoint("llama", "tied")),
        tensor_parallel_size=grid[0],
        pipeline_parallel_size=grid[1],
        **SETTINGS | settings,
    )


def lose(thread_workers: list[ThreadWorkers], rank: int) -> None:  # noqa: F811
    thread_workers[0].workers[rank]._engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("grid", [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_loss_while_the_group_is_formed(thread_workers, monkeypatch, grid, is_late):  # noqa: F811
    """The rank of the stage before waits for the lost one, and goes on with the next attempt: no
    other worker is started again."""
    start, num_lost = Worker._start, [0]

    def failing(this, message):
        if message.epoch == 2 and this._rank.number == 1:
            num_lost[0] += 1
            if is_late:
                start(this, message)
            raise PeerLostError("injected")
        start(this, message)

    monkeypatch.setattr(Worker, "_start", failing)
    with group_of(grid) as llm:
        expected = tokens(llm)
        lose(thread_workers, 1)
        assert tokens(llm) == expected
        assert num_lost == [1]
        assert thread_workers[0].num_started == grid[0] * grid[1] - 1 + 2
        assert llm._loaded.core._runner._group.epoch == 3


def test_a_worker_that_cannot_start_its_memory(thread_workers, monkeypatch):  # noqa: F811
    """It is started again."""
    start, num_failed = Worker._start, [0]

    def failing(this, message):
        if message.epoch == 2:
            num_failed[0] += 1
            this._epoch = message.epoch
            this._report(messages.Kind.FAILED, {"text": "no memory"})
            return
        start(this, message)

    monkeypatch.setattr(Worker, "_start", failing)
    with group_of((2, 1)) as llm:
        expected = tokens(llm)
        lose(thread_workers, 1)
        assert tokens(llm) == expected
        assert num_failed == [1]


def test_requests_end_when_no_worker_comes(thread_workers, monkeypatch):  # noqa: F811
    """Later ones are served, once workers start again."""
    with group_of((2, 1), group_restart_s=0.2) as llm:
        expected = tokens(llm)
        start, is_broken = ThreadWorkers.start, [True]

        def failing(this, ranks, check=object):
            if is_broken[0]:
                raise MergestepError("injected")
            return start(this, ranks, check)

        monkeypatch.setattr(ThreadWorkers, "start", failing)
        monkeypatch.setattr("serve.group.recovery._RETRY_S", 0.01)
        lose(thread_workers, 1)
        assert [reason for _, reason in tokens(llm)] == ["error"] * len(PROMPTS)
        is_broken[0] = False
        group = llm._loaded.core._runner._group
        for _ in range(500):
            if not group.is_lost():
                break
            threading.Event().wait(0.01)
        assert tokens(llm) == expected
        assert llm.stats().pages_in_use == 0


def test_an_engine_that_ends_while_workers_start(thread_workers, monkeypatch):  # noqa: F811
    begun = threading.Event()

    def waiting(this, ranks, check=object):
        begun.set()
        while True:
            check()
            threading.Event().wait(0.01)

    with group_of((1, 2)) as llm:
        tokens(llm)
        monkeypatch.setattr(ThreadWorkers, "start", waiting)
        lose(thread_workers, 1)
        assert begun.wait(10.0)
    assert not [each for each in threading.enumerate() if each.name == "mergestep-restart"]


def test_a_loss_that_is_seen_when_a_step_is_sent(thread_workers, monkeypatch):  # noqa: F811
    """The other ranks get the step all the same: rank 2 waits for what rank 4 computes of it."""
    monkeypatch.setattr("serve.group.group._WATCH_S", 1000.0)
    with group_of((2, 3)) as llm:
        expected = tokens(llm)
        lose(thread_workers, 3)
        assert tokens(llm) == expected
        assert thread_workers[0].num_started == 5 + 1


def test_a_connection_between_workers_is_made_again(thread_workers):  # noqa: F811
    """No worker is lost, so none is started again, and no request fails."""
    with group_of((1, 3)) as llm:
        expected = tokens(llm)
        thread_workers[0].workers[1]._previous.close()
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        assert llm.stats().pages_in_use == 0
    assert thread_workers[0].num_started == 2


def test_a_loss_between_two_steps_of_a_pipeline(thread_workers, monkeypatch):  # noqa: F811
    """It is met by the steps in flight, which are taken back, and costs one worker."""
    compute, num_steps = Group.compute, [0]

    def losing(this, posted):
        hidden = compute(this, posted)
        num_steps[0] += 1
        if num_steps[0] == 5:
            lose(thread_workers, 1)
            while not this.is_lost():
                time.sleep(0.01)
        return hidden

    with group_of((1, 2)) as llm:
        expected = tokens(llm)
        monkeypatch.setattr(Group, "compute", losing)
        began_s = time.monotonic()
        assert tokens(llm) == expected
        assert time.monotonic() - began_s < 20
    assert thread_workers[0].num_started == 2
