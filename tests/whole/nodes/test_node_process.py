"""`serve node` and `serve run --memory-nodes` as processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve import LLM, SamplingParams
from tests.support.nodes.served_nodes import KEY, key_file

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60


class Process:
    """A `serve` command and its log."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve", *map(str, arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log.read_text()):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT_S) == 0, self.log.read_text()


def ask(url: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"model": "mergestep-default", "max_tokens": 40}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_nodes_and_a_server_in_processes(tmp_path):
    """A server over two nodes gives the same answer after one node has left; all exit with 0."""
    question = "What is the opposite of hot?"
    with LLM(dtype="float32", max_model_len=256) as llm:
        chat = [{"role": "user", "content": question}]
        params = SamplingParams(temperature=0, max_tokens=40)
        expected = llm.chat(chat, params, use_tqdm=False)[0].outputs[0].text
    key = key_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Process(
                    tmp_path / f"node-{number}",
                    *("node", "tcp://127.0.0.1:0", "--kv-cache-bytes", "32M"),
                    *("--memory-node-key-file", key, "--threads", 1),
                )
            )
            for number in range(2)
        ]
        urls = [node.wait_for(r"memory node at (\S+): 32 MiB") for node in started]
        server = stack.enter_context(
            Process(
                tmp_path / "server",
                *("run", "--port", port, "--dtype", "float32", "--max-model-len", 256),
                *("--memory-nodes", ",".join(urls), "--memory-node-key-file", key),
                *("--kv-cache-bytes", "32M"),
            )
        )
        url = server.wait_for(r"(http://127\.0\.0\.1:\d+)/v1/chat/completions")
        assert ask(url, question) == expected
        assert urls[0] in server.wait_for(r"K/V in float32, [\d.]+ MiB on (.*) \(head partition\)")
        started[0].stop()
        assert ask(url, question) == expected
        server.stop()
        started[1].stop()
    for name in ("node-0", "node-1", "server"):
        text = (tmp_path / name).read_text()
        assert KEY.decode() not in text and "Traceback" not in text
