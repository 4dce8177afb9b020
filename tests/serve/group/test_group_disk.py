"""The disk tier of several ranks: each keeps its part of a page, and tokens stay those of one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.group.faults import workers_of
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.engine.stats import EngineStats
from serve.errors import MergestepError
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
GRIDS = [(2, 1), (1, 2)]
SETTINGS = {
    "dtype": "int8",
    "max_model_len": 140,
    "max_num_seqs": 4,
    "kv_page_bytes": 4096,
    "max_chunk_tokens": 32,
    "kv_disk_bytes": 8 << 20,
}
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(2, 300) for _ in range(100)] for _ in range(8)]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def tokens(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [each.outputs[0].token_ids for each in found]


def group_of(grid: tuple[int, int], folder: Path | None, num_pages: int = 400) -> LLM:
    return LLM(
        str(checkpoint("llama", "tied")),
        tensor_parallel_size=grid[0],
        pipeline_parallel_size=grid[1],
        kv_cache_dir=folder,
        kv_cache_bytes=grid[0] * grid[1] * num_pages * 4096,
        **SETTINGS,
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with group_of((1, 1), None) as llm:
        return tokens(llm)


def quiet_stats(llm: LLM) -> EngineStats:
    """Returns statistics when no page is being written any more."""
    end_s = time.monotonic() + 10.0
    while (stats := llm.stats()).pages_in_use and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not stats.pages_in_use
    return stats


def folders(root: Path, rank: int) -> Iterator[Path]:
    return root.glob(f"rank-{rank}-of-2/*")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_evicted_pages_are_loaded_again(thread_workers, tmp_path, expected, grid):  # noqa: F811
    """Memory holds a few of the prompts."""
    with group_of(grid, tmp_path, num_pages=16) as llm:
        assert tokens(llm) == expected
        quiet_stats(llm)
        assert tokens(llm) == expected
        stats = quiet_stats(llm)
    assert stats.prefix_evicted_pages > 0
    assert stats.disk_loaded_pages > 0
    assert stats.disk_failed_pages == stats.disk_lost_pages == 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_new_group_finds_the_pages(thread_workers, tmp_path, expected, grid):  # noqa: F811
    for is_new in (True, False):
        with group_of(grid, tmp_path) as llm:
            assert tokens(llm) == expected
            assert (llm.stats().disk_loaded_pages == 0) == is_new
    names = [[path.name for path in folders(tmp_path, rank)] for rank in (0, 1)]
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1], "ranks do not share pages"


def test_another_grid_finds_nothing(thread_workers, tmp_path, expected):  # noqa: F811
    for grid in GRIDS:
        with group_of(grid, tmp_path) as llm:
            assert tokens(llm) == expected
            assert llm.stats().disk_loaded_pages == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_gone", [False, True])
def test_what_one_rank_has_not_is_computed(
    thread_workers,  # noqa: F811
    tmp_path,
    expected,
    rank,
    is_gone,
):
    """Its pages are corrupt, or its folder is gone. The others drop theirs, and all is stored
    again."""
    with group_of((1, 2), tmp_path) as llm:
        assert tokens(llm) == expected
    (folder,) = folders(tmp_path, rank)
    if is_gone:
        shutil.rmtree(folder)
    else:
        (pages,) = folder.glob("pages-*.kv")
        pages.write_bytes(pages.read_bytes().translate(bytes(reversed(range(256)))))
    with group_of((1, 2), tmp_path) as llm:
        assert tokens(llm) == expected
        stats = llm.stats()
        assert stats.disk_loaded_pages == 0
        assert (stats.disk_lost_pages > 0) == (rank == 1 or not is_gone)
    with group_of((1, 2), tmp_path) as llm:
        assert tokens(llm) == expected
        assert llm.stats().disk_loaded_pages > 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_new_rank_finds_its_pages(thread_workers, tmp_path, expected, grid):  # noqa: F811
    """What was evicted before the loss is loaded, because the lost rank's folder is there."""
    with group_of(grid, tmp_path, num_pages=16) as llm:
        assert tokens(llm) == expected
        before = llm.stats().disk_loaded_pages
        thread_workers[0].workers[1]._engine.close()
        assert tokens(llm) == expected
        stats = quiet_stats(llm)
        assert stats.disk_loaded_pages > before
    # a first attempt may find that the lost rank, a thread here, still holds its folder
    assert thread_workers[0].num_started >= 2


def test_a_loss_under_load(thread_workers, tmp_path, expected):  # noqa: F811
    """Pages are on their way to and from the disk."""
    with group_of((1, 2), tmp_path, num_pages=16) as llm:
        for number in range(4):
            worker = thread_workers[0].workers[1]
            edit, left = worker._rank.edit, [5 + 3 * number]

            def edit_or_end(edits, worker=worker, edit=edit, left=left):
                left[0] -= 1
                if not left[0]:
                    worker._engine.close()
                edit(edits)

            worker._rank.edit = edit_or_end
            assert tokens(llm) == expected
        quiet_stats(llm)
    # more where a new thread comes before the old one has closed its folder
    assert thread_workers[0].num_started >= 5


def test_a_folder_that_a_rank_cannot_use_is_named(thread_workers, tmp_path):  # noqa: F811
    (tmp_path / "rank-1-of-2").write_text("no folder")
    with pytest.raises(MergestepError, match=r"rank 1.*kv_cache_dir"):
        group_of((1, 2), tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_killed_process(tmp_path, expected, grid):
    """What the idle engine has written is loaded, by the new process and by the next group."""
    with group_of(grid, tmp_path) as llm:
        assert tokens(llm) == expected
        wait_for_writes(llm)
        (pid,) = workers_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert tokens(llm) == expected
        assert llm.stats().disk_loaded_pages > 0
    with group_of(grid, tmp_path) as llm:
        assert tokens(llm) == expected
        assert llm.stats().disk_loaded_pages > 0


def wait_for_writes(llm: LLM) -> None:
    """Waits until an idle engine has written its pages."""
    end_s, stored = time.monotonic() + 20.0, -1
    while (now := llm.stats().disk_stored_pages) != stored or not now:
        assert time.monotonic() < end_s, f"{now} pages are written"
        stored = now
        time.sleep(1.5)  # an engine writes after half a second without work
