"""`serve cluster` on Ray nodes of this machine: the tokens of one process, and faults."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ops.cpu import native_library
from serve import LLM, SamplingParams
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import token_ids
from tests.support.source_tree import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
PATIENCE_S = 100.0
SETTINGS = {"max_model_len": 140, "max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "dtype": "int8"}
PROMPTS = [token_ids(20, seed=seed) for seed in range(3)]
NUM_TOKENS = 60
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


class Nodes:
    """Three Ray nodes; the first has the cluster's own processes and no CPUs for ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cluster.ray_nodes", "0", "2", "2"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            text=True,
        )
        for line in self._lines():
            if line.startswith("address "):
                _, self.address, *self.ids = line.split()
                return
        raise AssertionError("Ray did not start")

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        return iter(self._process.stdout.readline, "")

    def kill(self, short_id: str) -> None:
        (number,) = [at for at, each in enumerate(self.ids) if each.startswith(short_id)]
        assert number, "the node with the cluster's own processes"
        assert self._process.stdin is not None
        print("kill", number, file=self._process.stdin, flush=True)
        assert "killed\n" in self._lines()

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)  # closes its input


class Command:
    """A `serve cluster` in the foreground."""

    def __init__(self, folder: Path, nodes: Nodes, model: str, *options: str) -> None:
        self.log_path = folder / "log"
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        command = [sys.executable, "-m", "serve", "cluster", model, "--port=0", *settings]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--ray-address", nodes.address, "--cpus-per-rank=1", *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for(self, is_met: Callable[[str], object]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_met(self.log):
            assert time.monotonic() < end_s and self.process.poll() is None, self.log
            time.sleep(0.05)

    def starts(self, rank: int) -> list[tuple[str, int]]:
        """Returns the node and the process of each start of a rank."""
        found = re.findall(rf"rank {rank} starts on \S+ \((\w+)\) as process (\d+)", self.log)
        return [(node, int(pid)) for node, pid in found]

    @property
    def url(self) -> str:
        return re.findall(r"ready at (\S+)", self.log)[-1]

    def ask(self, number: int) -> list[int]:
        """Returns the answer to one of PROMPTS."""
        body = {"model": "llama-base-0", "prompt": PROMPTS[number], "max_tokens": NUM_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return list(json.loads(response.read())["choices"][0]["token_ids"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Load:
    """Clients that each ask one prompt again and again, from the start to `end`."""

    def __init__(self, command: Command, expected: list[list[int]]) -> None:
        self.num_right = 0
        self.problems: list[str] = []
        self._command, self._expected = command, expected
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._ends.is_set():
            try:
                if self._command.ask(number) == self._expected[number]:
                    self.num_right += 1
                else:
                    self.problems.append(f"other tokens for prompt {number}")
            except OSError as error:
                self.problems.append(str(error))
                return

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    started = Nodes()
    yield started
    started.close()


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(checkpoint("llama", "base")), **SETTINGS) as llm:  # type: ignore[arg-type]
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def await_end(pids: list[int]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end_s, alive
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_model_that_is_missing_is_named(undo, tmp_path, nodes):
    command = Command(tmp_path, nodes, str(tmp_path / "none"), "--pipeline-parallel-size=2")
    undo.callback(command.close)
    assert command.process.wait(PATIENCE_S) == 1
    assert f"model directory {tmp_path / 'none'} does not exist" in command.log.splitlines()[-1]
    assert "Traceback" not in command.log


def test_ranks_end_with_a_killed_command(undo, tmp_path, nodes):
    command = Command(tmp_path, nodes, str(checkpoint("llama", "base")), "--tp=2")
    undo.callback(command.close)
    command.wait_for(lambda log: "ready at" in log)
    assert command.starts(0)[0][0] == command.starts(1)[0][0]  # a stage has one node
    command.close()
    await_end([pid for rank in (0, 1) for _, pid in command.starts(rank)])


def test_lost_ranks_actors_and_nodes_are_replaced(undo, tmp_path, nodes, alone):
    """A rank's process, its actor and its node are killed under load; then the engine."""
    path = str(checkpoint("llama", "base"))
    command = Command(tmp_path, nodes, path, "--pipeline-parallel-size=2")
    undo.callback(command.close)
    command.wait_for(lambda log: "ready at" in log)
    assert [command.ask(number) for number in range(len(PROMPTS))] == alone
    assert command.starts(0)[0][0] != command.starts(1)[0][0]  # spread over the nodes

    load = Load(command, alone)
    undo.callback(load.end)
    for number, kill in enumerate(("process", "actor", "node"), 1):
        right_before = load.num_right
        node, pid = command.starts(1)[-1]
        if kill == "node":
            nodes.kill(node)
        else:
            os.kill(pid if kill == "process" else parent_of(pid), signal.SIGKILL)
        command.wait_for(lambda log, number=number: log.count("group is whole again") == number)
        command.wait_for(lambda _, least=right_before + 6: load.num_right >= least)
        assert not is_alive(pid)
    load.end()
    assert load.problems == []
    assert command.starts(1)[-1][0] == command.starts(0)[0][0]  # the node that is left
    assert len(command.starts(0)) == 1

    os.kill(command.starts(0)[0][1], signal.SIGKILL)
    command.wait_for(lambda log: log.count("ready at") > 1)
    assert [command.ask(number) for number in range(len(PROMPTS))] == alone

    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in command.log
    assert not [pid for rank in (0, 1) for _, pid in command.starts(rank) if is_alive(pid)]
    folder = tmp_path / "plan"
    folder.mkdir()
    plan = Command(folder, nodes, path, "--cpus-per-rank=2", "--dry-run")
    assert plan.process.wait(PATIENCE_S) == 0, plan.log  # the CPUs are free again
    assert plan.starts(0) == [] and "rank  stage  tensor  CPUs  node" in plan.log


def test_replicas_are_killed_and_updated_under_load(undo, tmp_path, nodes, alone):
    """The hop before two replicas: one is killed, then both are updated, and nobody notices."""
    command = Command(tmp_path, nodes, str(checkpoint("llama", "base")), "--replicas=2")
    undo.callback(command.close)
    command.wait_for(lambda log: log.count(" answers") == 2)
    load = Load(command, alone)
    undo.callback(load.end)
    command.wait_for(lambda _: load.num_right >= 6)
    _, pid = command.starts(0)[0]
    os.kill(pid, signal.SIGKILL)
    command.wait_for(lambda log: log.count(" answers") == 3)
    command.process.send_signal(signal.SIGHUP)
    command.wait_for(lambda log: log.count("serves again") == 2 and log.count(" answers") == 5)
    right_before = load.num_right
    command.wait_for(lambda _: load.num_right >= right_before + 6)
    load.end()
    assert load.problems == []
    assert len(command.starts(0)) == 5
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(PATIENCE_S) == 0
    await_end([pid for _, pid in command.starts(0)])
    assert "Traceback" not in command.log
