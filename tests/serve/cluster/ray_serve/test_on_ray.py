"""The application on a Ray of this machine: tokens, streams, lost servers, replicas from zero."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.cpu import native_library
from serve.machine import free_port
from tests.support.source_tree import ROOT

IS_THERE = all(importlib.util.find_spec(name) for name in ("ray", "fastapi", "starlette"))
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.skipif(not IS_THERE, reason="Ray Serve is not installed"),
]
PATIENCE_S = 120.0
SETTINGS = {"model": "default", "kv_cache_bytes": 64 << 20, "max_num_seqs": 8}
BODY = {"model": "mergestep-default", "max_tokens": 12, "temperature": 0}
CHAT = BODY | {"messages": [{"role": "user", "content": "Tell me a joke"}]}


class App:
    """The application and its driver."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self._process = process

    def states(self) -> dict[str, int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print("states", file=self._process.stdin, flush=True)
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    def answer(self) -> str:
        status, content = self.call("POST", "/v1/chat/completions", CHAT)
        assert status == 200, content
        text: str = json.loads(content)["choices"][0]["message"]["content"]
        return text


@contextmanager
def running(**args: Any) -> Iterator[App]:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.cluster.ray_serve_app", str(port)]
    process = subprocess.Popen(
        [*command, json.dumps(SETTINGS | args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "ready\n" in iter(process.stdout.readline, "")
        yield App(port, process)
    finally:
        process.communicate(timeout=PATIENCE_S)  # closes its input


def server_pids() -> set[int]:
    """Returns the `serve run` processes that replicas have started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and b"--config" in words and any(b"/proc/self/fd" in w for w in words):
            found.add(int(folder.name))
    return found


def wait_for(condition: Any, seconds: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.2)


def test_calls_pass_through_and_a_lost_server_is_replaced() -> None:
    others = server_pids()
    with running() as app:
        expected = app.answer()
        assert expected
        status, content = app.call("POST", "/v1/chat/completions", CHAT | {"stream": True})
        events = [line for line in content.split(b"\n") if line.startswith(b"data: ")]
        assert status == 200 and events[-1] == b"data: [DONE]"
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == expected
        assert app.call("GET", "/v1/models")[0] == 200
        status, content = app.call("POST", "/v1/chat/completions", {"model": "x"})
        assert status == 400 and b"messages is missing" in content
        assert app.call("GET", "/nowhere")[0] == 404
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(0.0)
        with listener:
            status, content = app.call("GET", f"//127.0.0.1:{listener.getsockname()[1]}/v1/models")
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert status == 400 and b"invalid_path" in content, "the path names another host"
        status, content = app.call("GET", "/v1/models/mergestep%2Ddefault?x=%26")
        assert status == 200 and b"mergestep-default" in content
        (pid,) = server_pids() - others
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server_pids() - others - {pid})
        wait_for(lambda: app.call("GET", "/ready")[0] == 200)
        assert app.answer() == expected
    wait_for(lambda: server_pids() <= others, 40.0)


def test_a_call_starts_the_first_replica() -> None:
    others = server_pids()
    with running(min_replicas=0, max_replicas=1, shrink_seconds=3.0) as app:
        wait_for(lambda: not server_pids() - others)
        assert app.answer()
        assert app.states().get("RUNNING") == 1
        wait_for(lambda: not app.states().get("RUNNING"))
        wait_for(lambda: not server_pids() - others, 40.0)
        assert app.answer(), "and again"


def test_a_stream_goes_on_where_its_server_is_lost() -> None:
    others = server_pids()
    with running(min_replicas=2, max_replicas=2, max_model_len=1024) as app:
        wait_for(lambda: app.states().get("RUNNING") == 2)
        body = CHAT | {"stream": True, "max_tokens": 900, "ignore_eos": True, "n": 8}
        body |= {"temperature": 0.8, "seed": 7}
        _, expected = app.call("POST", "/v1/chat/completions", body)
        connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        found = response.read(400)
        busy, seconds = busiest(server_pids() - others)
        assert seconds > 0.01, "it computes"
        os.kill(busy, signal.SIGKILL)
        found += response.read()
        connection.close()
        assert texts_of(found) == texts_of(expected) and found.endswith(b"data: [DONE]\n\n")
        assert b"tokens [" not in found and len(texts_of(found)) == 8
    wait_for(lambda: server_pids() <= others, 40.0)


def texts_of(stream: bytes) -> dict[int, str]:
    """Returns what a stream says, by choice."""
    texts: dict[int, str] = {}
    for line in stream.split(b"\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
            text = choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def busiest(pids: set[int]) -> tuple[int, float]:
    """Returns the process that computes most in the next fifth of a second, and for how long."""

    def seconds(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = {pid: seconds(pid) for pid in pids}
    time.sleep(0.2)
    spent = {pid: seconds(pid) - before[pid] for pid in pids}
    chosen = max(pids, key=spent.__getitem__)
    return chosen, spent[chosen]
