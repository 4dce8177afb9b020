"""Groups of real processes that are killed and stopped, and a killed engine's workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.group.fault_rounds import SETTINGS, Leftover, own_folder, workers_of
from bench.group.faults import run
from ops.cpu import native_library
from serve import LLM
from serve.errors import MergestepError
from serve.group.launch import LocalWorkers
from serve.group.links.worker_link import WorkerLink
from tests.support.engine.checkpoints import checkpoint

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.process,
]
END_S = 2.0
STARTS_S = 30.0  # for processes to import
ENGINE = """
import os, sys
from bench.group.fault_rounds import SETTINGS, workers_of
from serve import LLM, SamplingParams
from serve.group.launch import LocalWorkers
spawn = LocalWorkers._spawn
def spawned(this):
    process = spawn(this)
    print("spawned", process.pid, flush=True)
    return process
LocalWorkers._spawn = spawned
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


@pytest.fixture
def engine(tmp_path) -> Iterator[subprocess.Popen[str]]:
    model = str(checkpoint("llama", "tied"))
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:
        yield process
        process.kill()


def _workers(engine: subprocess.Popen[str]) -> list[int]:
    """Returns the workers, once they serve."""
    assert engine.stdout is not None
    while (words := engine.stdout.readline().split())[0] == "spawned":
        pass
    return [int(word) for word in words]


def _all_end(pids: list[int]) -> bool:
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s and not all(map(_ended, pids)):
        time.sleep(0.02)
    return all(map(_ended, pids))


def test_workers_of_a_killed_engine_end(engine, tmp_path):
    """They also remove its folder of sockets, one that was stopped too. Signals to end are for the
    engine alone."""
    workers = _workers(engine)
    assert len(workers) == 3
    for pid in workers:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert not any(map(_ended, workers))
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    engine.kill()
    engine.wait()
    assert _all_end(workers)
    assert not list(tmp_path.iterdir())


def test_workers_of_an_engine_that_is_killed_while_they_start_end(engine, tmp_path):
    assert engine.stdout is not None
    workers = [int(engine.stdout.readline().split()[1]) for _ in range(3)]
    engine.kill()
    engine.wait()
    end_s = time.monotonic() + STARTS_S
    while time.monotonic() < end_s and not all(map(_ended, workers)):
        time.sleep(0.02)
    assert all(map(_ended, workers))
    assert not list(tmp_path.iterdir())
    assert engine.stderr is not None and "Traceback" not in engine.stderr.read()


def test_an_engine_ends_while_a_worker_is_replaced(monkeypatch):
    """`shutdown` ends what is left of the group, whose lost worker was closed already."""
    closed: list[object] = []
    close = WorkerLink.close

    def noted(this: WorkerLink) -> None:
        close(this)
        closed.append(this)

    monkeypatch.setattr(WorkerLink, "close", noted)
    with own_folder():
        with LLM(str(checkpoint("llama", "tied")), **SETTINGS):
            pass  # modules and their threads are there
        before = Leftover.now()
        llm = LLM(str(checkpoint("llama", "tied")), tensor_parallel_size=2, **SETTINGS)
        monkeypatch.setattr(LocalWorkers, "_spawn", _endless_start)
        os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
        end_s = time.monotonic() + STARTS_S
        while not closed and time.monotonic() < end_s:
            time.sleep(0.02)
        assert closed
        llm.shutdown()
        assert Leftover.now().since(before) == {}


def _endless_start(this: LocalWorkers) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


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
