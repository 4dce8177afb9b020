"""Groups of real processes that are killed and stopped, and a killed engine's workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.group.fault_rounds import SETTINGS, Leftover, own_folder, workers_of
from bench.group.faults import run
from ops.cpu import native_library
from serve import LLM
from serve.errors import MergestepError
from tests.support.engine.checkpoints import checkpoint

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.process,
]
END_S = 2.0
ENGINE = """
import os, sys
from bench.group.fault_rounds import SETTINGS, workers_of
from serve import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, pipeline_parallel_size=2, **SETTINGS) as llm:
    print(*workers_of(os.getpid()), flush=True)
    while True:
        llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=50, ignore_eos=True))
"""


@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_killed_and_stopped_workers(grid):
    """No request fails, no token changes, and nothing is left."""
    found = run(str(checkpoint("llama", "tied")), grid, kills=4, seed=sum(grid))
    assert found.faults >= 4
    assert (found.failed, found.changed, found.left) == (0, 0, {})
    assert found.whole_s


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_workers_of_a_killed_engine_end(tmp_path):
    """They also remove its folder of sockets. Signals to end are for the engine alone."""
    model = str(checkpoint("llama", "tied"))
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, model],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as engine:
        assert engine.stdout is not None
        workers = [int(word) for word in engine.stdout.readline().split()]
        assert len(workers) == 3
        for pid in workers:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.3)
        assert not any(map(_ended, workers))
        engine.kill()
        engine.wait()
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s and not all(map(_ended, workers)):
            time.sleep(0.02)
        assert all(map(_ended, workers))
        assert not list(tmp_path.iterdir())


def test_a_worker_killed_while_it_starts(monkeypatch):
    """The start fails with the rank's name, and nothing is left."""
    model = str(checkpoint("llama", "tied"))
    with LLM(model, **SETTINGS):
        pass  # modules and their threads are there
    spawn = subprocess.Popen

    def killed(*arguments, **options):
        process = spawn(*arguments, **options)
        if "serve.group.worker_main" in arguments[0]:
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr("serve.group.launch.subprocess.Popen", killed)
    with own_folder():
        before = Leftover.now()
        with (
            pytest.raises(MergestepError, match=r"the worker of rank \d ended"),
            LLM(model, tensor_parallel_size=2, pipeline_parallel_size=2, **SETTINGS),
        ):
            pass
        assert Leftover.now().since(before) == {}
    assert not workers_of(os.getpid())
