"""Servers that answer the turns of chats: `serve run` and llama.cpp's, each in its own process,
asked with the same client. Prompts are token ids, and answers are greedy and of a fixed length.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from serve.errors import ConfigError, MergestepError
from serve.machine import free_port

_START_S = 600.0
_ANSWER_S = 600.0
_STOP_S = 30.0
_HOST = "127.0.0.1"
_JSON = {"Content-Type": "application/json"}
_END = b"[DONE]"


class Answer(NamedTuple):
    """computed: tokens of the prompt that were not taken from a cache. first_s and last_s: from the
    call to the first and to the last token."""

    token_ids: list[int]
    computed: int
    first_s: float
    last_s: float


class Server(Protocol):
    """A server that is running."""

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Returns the answer to a prompt. Raises MergestepError if the server refuses it."""
        ...


class _Mergestep:
    def __init__(self, port: int) -> None:
        self._port = port
        document = json.loads(_get(port, "/v1/models"))
        self._model = document["data"][0]["id"]

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens, times, usage = [], [], None
        for at_s, event in _events(self._port, "/v1/completions", body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if found := choice.get("token_ids"):
                    tokens += found
                    times.append(at_s)
        assert usage is not None and len(tokens) == num_tokens, f"{len(tokens)} tokens"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(tokens, len(prompt) - cached, times[0], times[-1])


class _LlamaCpp:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        body = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        tokens, times, timings = [], [], None
        for at_s, event in _events(self._port, "/completion", body):
            timings = event.get("timings") or timings
            if not event["stop"] and event["tokens"]:
                tokens += event["tokens"]
                times.append(at_s)
        assert timings is not None and len(tokens) == num_tokens, f"{len(tokens)} tokens"
        return Answer(tokens, timings["prompt_n"], times[0], times[-1])


@contextmanager
def mergestep(model: str, options: Sequence[str]) -> Iterator[Server]:
    """Runs `serve run` with more options until the block ends. Raises MergestepError if it does not
    start."""
    port = free_port()
    command = [sys.executable, "-m", "serve", "run", model, "--port", str(port), *options]
    with _running([*command, "--log-level", "warning"], port, "/ready"):
        yield _Mergestep(port)


@contextmanager
def llama_cpp(program: str, model: Path, options: Sequence[str]) -> Iterator[Server]:
    """Runs llama-server with a GGUF file and more options until the block ends. Raises ConfigError
    if there is no such program or file, and MergestepError if it does not start."""
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"--peer-server {program} is not a program")
    if not model.is_file():
        raise ConfigError(f"--peer-model {model} is not a file")
    port = free_port()
    command = [found, "-m", str(model), "--host", _HOST, "--port", str(port), *options]
    with _running(command, port, "/health"):
        yield _LlamaCpp(port)


@contextmanager
def _running(command: list[str], port: int, ready: str) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end_s = time.monotonic() + _START_S
            while not _is_ready(port, ready):
                if process.poll() is not None or time.monotonic() > end_s:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    text = "\n".join(lines[-5:])
                    raise MergestepError(f"{command[0]} did not start: {text}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(port: int, path: str) -> bool:
    with suppress(OSError, http.client.HTTPException, MergestepError):
        _get(port, path)
        return True
    return False


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection(_HOST, port, timeout=10.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise MergestepError(f"GET {path}: {answer.status} {data[:300]!r}")
        return data
    finally:
        connection.close()


def _events(port: int, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Posts the body and yields each event with the seconds after which it came."""
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection(_HOST, port, timeout=_ANSWER_S)
    try:
        began_s = time.perf_counter()
        connection.request("POST", path, data, _JSON)
        answer = connection.getresponse()
        if answer.status != 200:
            raise MergestepError(f"POST {path}: {answer.status} {answer.read(300)!r}")
        while line := answer.readline():
            at_s = time.perf_counter() - began_s
            if line.startswith(b"data:") and not line.endswith(_END + b"\n"):
                yield at_s, json.loads(line[len(b"data:") :])
    finally:
        connection.close()
