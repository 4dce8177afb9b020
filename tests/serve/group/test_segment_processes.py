"""Ranks and holders that are processes: both are killed under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from bench.group.faults import workers_of
from ops.cpu import native_library
from serve import LLM
from tests.serve.group.test_group_segments import SETTINGS, load
from tests.support.engine.checkpoints import checkpoint

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.process,
]
START_S = 60.0
# two of three holders have room for the four segments of the longest sequence
LONG = SETTINGS | {"max_model_len": 640}


def start_node(url: str) -> subprocess.Popen[bytes]:
    path = url.removeprefix("shm://")
    if os.path.exists(path):  # of a killed node
        os.unlink(path)
    node = subprocess.Popen(
        [sys.executable, "-m", "serve", "node", url, "--kv-cache-bytes", "16MiB"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end_s = time.monotonic() + START_S
    while not os.path.exists(path):
        assert node.poll() is None and time.monotonic() < end_s, "the node does not start"
        time.sleep(0.02)
    return node


@contextmanager
def holders(folder, count):
    """Yields the nodes' processes by their addresses."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number in range(count):
            url = f"shm://{folder}/{number}"
            running[url] = start_node(url)
        yield running
    finally:
        for node in running.values():
            node.kill()
            node.wait()


def answers(llm):
    found = llm.generate(*load(), use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in found]


def during(llm, fault):
    """Returns answers during which a fault comes: once some sequences run."""
    is_over = threading.Event()

    def strike():
        while not llm.stats().pages_in_use and not is_over.wait(0.005):
            pass
        assert not is_over.is_set(), "the answers came before the fault"
        fault()

    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(strike)
        try:
            return answers(llm)
        finally:
            is_over.set()
            striking.result(START_S)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=str)
def test_killed_holders_and_ranks(grid, tmp_path):
    """No request fails, no token changes, and no process is left. While a holder is gone, the
    others hold its segments."""
    model = str(checkpoint("llama", "long"))
    with LLM(model, **LONG) as llm:
        expected = answers(llm)
    with (
        holders(tmp_path, 3) as running,
        LLM(
            model,
            tensor_parallel_size=grid[0],
            pipeline_parallel_size=grid[1],
            kvp=list(running),
            **LONG,
        ) as llm,
    ):
        assert answers(llm) == expected

        def kill_holder():
            url = next(iter(running))
            running[url].kill()
            running[url].wait()
            running[url] = start_node(url)

        def kill_rank():
            os.kill(workers_of(os.getpid())[0], signal.SIGKILL)

        for fault in (kill_holder, kill_rank):
            assert during(llm, fault) == expected
            assert answers(llm) == expected
        stats = llm.stats()
        assert stats.memory_nodes_lost >= 1
        assert stats.pages_in_use == 0
    assert not workers_of(os.getpid())
