"""`serve run` as the ranks of one model, as torchrun and Kubernetes start it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.machine import free_port
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import token_ids
from tests.support.source_tree import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
]
PATIENCE_S = 60.0
PROMPT = token_ids(20, seed=1)
SETTINGS = {"max_model_len": 140, "max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "dtype": "int8"}


class Ranks:
    """Processes of one model on this machine. port: the engine's for ranks."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.key_file = folder / "key"
        self.key_file.write_bytes(os.urandom(16).hex().encode())
        self.key_file.chmod(0o600)
        self.folder = folder
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        self.options = [*settings, f"--group-key-file={self.key_file}", *options]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, rank: int, variables: dict[str, str], module: Sequence[str] = ("serve",)
    ) -> None:
        """module: what python -m runs, with its first arguments."""
        path = checkpoint("llama", "base")
        more = ["--port", str(self.http_port)] if rank == 0 else []
        with (self.folder / f"log-{rank}").open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", *module, "run", str(path), *self.options, *more],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
            )

    def torchrun(self, rank: int, size: int) -> None:
        variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": self.port - 1}
        variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        self.start(rank, {"MASTER_ADDR": "127.0.0.1"} | {n: str(v) for n, v in variables.items()})

    def tokens(self) -> list[int]:
        """Returns the answer to PROMPT, once the engine is ready."""
        body = {"model": "llama-base-0", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                    return list(json.loads(response.read())["choices"][0]["token_ids"])
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                text = error.read().decode()
            except OSError as error:
                text = str(error)
            assert time.monotonic() < end_s and self.processes[0].poll() is None, text
            time.sleep(0.1)

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def alone() -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(checkpoint("llama", "base")), **SETTINGS) as llm:  # type: ignore[arg-type]
        (result,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(result.outputs[0].token_ids)


TENSOR = ("--tensor-parallel-size=2", "--group-exchange=connections")


@pytest.mark.parametrize("options", [TENSOR, ("--pipeline-parallel-size=2",)], ids=["tp", "pp"])
def test_processes_of_torchrun(undo, tmp_path, alone, options):
    """A signal ends the engine, which ends the other rank."""
    ranks = Ranks(tmp_path, *options)
    undo.callback(ranks.close)
    for rank in (1, 0):
        ranks.torchrun(rank, 2)
    assert ranks.tokens() == alone
    ranks.processes[0].send_signal(signal.SIGTERM)
    assert [ranks.processes[rank].wait(PATIENCE_S) for rank in (0, 1)] == [0, 0]
    assert "Traceback" not in ranks.log(0) + ranks.log(1)


def test_the_launcher_of_torch(undo, tmp_path, alone):
    """`torchrun` starts the ranks, and a signal to it ends them."""
    ranks = Ranks(tmp_path, "--pipeline-parallel-size=2")
    undo.callback(ranks.close)
    launcher = ["torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    ranks.start(0, {}, [*launcher, f"--master-port={ranks.port - 1}", "-m", "serve"])
    assert ranks.tokens() == alone
    assert "rank 1 of 2 is connected" in ranks.log(0)
    ranks.processes[0].send_signal(signal.SIGTERM)
    ranks.processes[0].wait(PATIENCE_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ranks.http_port))


def test_a_killed_rank_comes_back(undo, tmp_path, alone):
    """Two stages of two ranks; strangers at the engine's port do not disturb."""
    ranks = Ranks(tmp_path, *TENSOR, "--pipeline-parallel-size=2")
    undo.callback(ranks.close)
    for rank in range(4):
        ranks.torchrun(rank, 4)
    assert ranks.tokens() == alone
    silent, loud = (
        undo.enter_context(socket.create_connection(("127.0.0.1", ranks.port))) for _ in range(2)
    )
    loud.sendall(bytes(range(256)) * 10)
    ranks.processes[2].kill()
    ranks.processes[2].wait()
    ranks.torchrun(2, 4)
    assert ranks.tokens() == alone
    assert [ranks.processes[rank].poll() for rank in range(4)] == [None] * 4
    assert "the group is whole again" in ranks.log(0)
    silent.settimeout(PATIENCE_S)
    assert silent.recv(1) == b""  # closed without a word


def test_a_killed_engine_comes_back(undo, tmp_path, alone):
    """The other rank connects to the new one."""
    ranks = Ranks(tmp_path, *TENSOR)
    undo.callback(ranks.close)
    for rank in (0, 1):
        ranks.torchrun(rank, 2)
    assert ranks.tokens() == alone
    ranks.processes[0].kill()
    ranks.processes[0].wait()
    ranks.torchrun(0, 2)
    assert ranks.tokens() == alone
    assert ranks.processes[1].poll() is None


def test_pods_of_a_leader_worker_set(undo, tmp_path, alone):
    ranks = Ranks(tmp_path, "--pipeline-parallel-size=2")
    undo.callback(ranks.close)
    for rank in (0, 1):
        variables = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2"}
        url = f"tcp://127.0.0.1:{ranks.port}"
        variables |= {"LWS_WORKER_INDEX": str(rank), "MERGESTEP_GROUP_URL": url}
        ranks.start(rank, variables)
    assert ranks.tokens() == alone


def test_a_signal_ends_a_rank_without_an_engine(undo, tmp_path):
    ranks = Ranks(tmp_path, "--tensor-parallel-size=2")
    undo.callback(ranks.close)
    ranks.torchrun(1, 2)
    end_s = time.monotonic() + PATIENCE_S
    while "rank 1 waits for the engine" not in ranks.log(1) and time.monotonic() < end_s:
        time.sleep(0.05)
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.processes[1].wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert "Traceback" not in ranks.log(1)


def test_a_wrong_number_of_processes_is_named(undo, tmp_path):
    ranks = Ranks(tmp_path, "--tensor-parallel-size=2")
    undo.callback(ranks.close)
    ranks.torchrun(1, 3)
    assert ranks.processes[1].wait(PATIENCE_S) == 2
    expected = "WORLD_SIZE 3 is not tensor_parallel_size * pipeline_parallel_size, 2 * 1"
    assert expected in " ".join(ranks.log(1).split())
