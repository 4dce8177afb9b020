"""A signal ends `serve run` at once at every moment of loading, and so does a wrong file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve.config import default_model_path
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import Json, edit_json

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
LIMIT_S = 1.5  # a second, and the machine's noise


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


PYTHON = """
import sys
from serve import LLM
print("loading the model", file=sys.stderr, flush=True)
LLM(sys.argv[1])
"""


@contextlib.contextmanager
def loading(model: Path, *options: str, library: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Yields a server that has begun to load the model, or a program that uses the library."""
    command = ("-m", "serve", "run", str(model), "--port", "0", *options)
    process = run(*(("-c", PYTHON, str(model)) if library else command))
    assert process.stderr is not None
    try:
        while "loading the model" not in (line := process.stderr.readline()):
            assert line, "the server has ended"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def model_with(tmp_path: Path, config: Json, change: Callable[[Json], object]) -> Path:
    """Copies the embedded model with other values in its config.json and another tokenizer."""
    path = Path(shutil.copytree(default_model_path(), tmp_path / "model"))
    edit_json(path / "config.json", lambda values: values.update(config))
    edit_json(path / "tokenizer.json", change)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 0.4, 1.5])
def test_a_signal_while_weights_load(
    number: signal.Signals, after_s: float, tmp_path: Path
) -> None:
    """A model of 2 billion parameters is made and quantized for many seconds."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    model = model_with(tmp_path, shape, lambda state: None)
    with loading(model, "--load-format", "random", "--dtype", "int8") as process:
        time.sleep(after_s)
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == -number
        assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize(
    ("number", "library", "limit_s"),
    [(signal.SIGTERM, False, LIMIT_S), (signal.SIGINT, True, 3 * LIMIT_S)],  # Python frees all
)
def test_a_signal_while_the_tokenizer_is_tried(
    number: signal.Signals, library: bool, limit_s: float, tmp_path: Path
) -> None:
    """The child process ends with the server."""

    def change(state: Json) -> None:
        state |= make.unigram_with(make.sequence("normalizers"))
        state["model"]["vocab"] += [["a" * size, -1.0] for size in range(2, 4000)]

    with loading(model_with(tmp_path, {}, change), library=library) as process:
        deadline = time.monotonic() + 10
        while not (children := children_of(process)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == -number
        while any(map(is_running, children)):
            assert time.monotonic() - began < limit_s
            time.sleep(0.01)


def test_a_tokenizer_that_explodes_ends_the_start(tmp_path: Path) -> None:
    """It took 7.5 GB in 40 s, and SIGTERM did not end the process."""

    def change(state: Json) -> None:
        steps = [make.replace("a" * 10, String="a")] * 9
        state["normalizer"] = make.sequence("normalizers", *steps)

    with loading(model_with(tmp_path, {}, change)) as process:
        assert process.stderr is not None
        assert process.wait(30) == 1
        assert "tokenizer.json has a normalizer that can make a text" in process.stderr.read()


@pytest.mark.parametrize(("pid", "status"), [(None, -signal.SIGTERM), (1, 128 + signal.SIGTERM)])
def test_native_code_that_keeps_python_waiting(pid: int | None, status: int) -> None:
    """The system's default needs no Python. In the first process of a container it does nothing, so
    Python's handler has to run."""
    holds = "ctypes.PyDLL(None).sleep(30)" if pid is None else "time.sleep(30)"
    process = run(
        "-c",
        "import ctypes, os, sys, time\n"
        "from serve.signals import ended_by_signals\n"
        f"os.getpid = lambda pid=os.getpid(): {pid} or pid\n"
        "with ended_by_signals():\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        f"    {holds}\n",
    )
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == status
