"""Runs llama.cpp's server for `serve bench latency`: run_llama_cpp.py MODEL.gguf.

It needs the program llama-server, built for this processor (--server names it), and a MODEL.gguf
that convert_llama_cpp.py has written. The server merges requests into its steps (continuous
batching, -cb) in as many slots as there are sequences (-np). Modes: with flash attention and
without. A prefill counts as long as the server says that its prompt took, without HTTP; steps are
timed by the tokens that arrive here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from typing import IO, Any

import runner
from runner import Prompt, Request

_READY_S = 600.0
_EVENT = b'"content":'  # in the event of every token
_MODES = {"flash attention": "on", "no flash attention": "off"}


class LlamaServer:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.modes = tuple(args.mode or _MODES)
        self._program = shutil.which(args.server) or args.server
        shown = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        version = re.search(r"version: *([^\n]+)", shown.stdout + shown.stderr)
        if version is None:
            raise SystemExit(f"{args.server} does not tell its version: {shown.stderr[-300:]}")
        self.name = f"llama-server {version[1].strip()}, continuous batching"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def use(self, mode: str) -> None:
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        args, threads = self._args, str(self._args.threads)
        command = [self._program, "-m", str(args.model), "--port", str(self._port)]
        command += ["-np", str(args.sequences), "-cb", "-c", str(args.sequences * args.tokens)]
        command += ["-t", threads, "-tb", threads, "-fa", _MODES[mode], "--no-webui"]
        command += ["--cache-ram", "0", "--no-cache-prompt"]
        self._log.truncate(0)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        due_s = time.monotonic() + _READY_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > due_s:
                raise RuntimeError(f"llama-server did not start: {self._last_line()}")
            time.sleep(0.05)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def first_token_s(self, prompt: Prompt) -> float:
        body = json.dumps(_body(prompt, 1, stream=False)).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self._port}/completion"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            found: dict[str, Any] = json.load(answer)
        assert found["timings"]["prompt_n"] == len(prompt), found["timings"]
        return float(found["timings"]["prompt_ms"]) / 1e3

    def decode_s(self, prompts: list[Prompt], num_steps: int) -> float:
        """Measures between the first token of the last request and the end of the first one."""
        lead = sum(map(len, prompts)) // 64 + 8  # the first ones decode while others are computed
        lead = min(lead, self._args.tokens - max(map(len, prompts)) - num_steps - 2)
        times = asyncio.run(self._stream([(prompt, lead + num_steps) for prompt in prompts]))
        began = max(each[0] for each in times)
        end = min(each[-1] for each in times)
        count = sum(began < at <= end for each in times for at in each)
        assert count >= num_steps * len(prompts) // 2, f"{count} tokens while all were decoding"
        return (end - began) * num_steps * len(prompts) / count

    def answer_s(self, requests: list[Request]) -> float:
        began = time.perf_counter()
        times = asyncio.run(self._stream(requests))
        end = time.perf_counter()
        for (_, number), each in zip(requests, times, strict=True):
            assert len(each) >= number, f"{len(each)} of {number} tokens"
        return end - began

    async def _stream(self, requests: list[Request]) -> list[list[float]]:
        """Sends all requests at once. Returns the time of each token of each request."""
        return list(await asyncio.gather(*(self._tokens(*request) for request in requests)))

    async def _tokens(self, prompt: Prompt, number: int) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps(_body(prompt, number, stream=True)).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        times: list[float] = []
        try:
            while data := await reader.read(1 << 16):
                times += [time.perf_counter()] * data.count(_EVENT)
        finally:
            writer.close()
        del times[number:]  # the last event has no token
        return times

    def _is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self._port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


def _body(prompt: Prompt, number: int, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": number,
        "ignore_eos": True,
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": False,
        "stream": stream,
    }


if __name__ == "__main__":
    parser = runner.options(__doc__)
    parser.add_argument("--server", default="llama-server", help="the program llama-server")
    parser.add_argument("--mode", action="append", choices=_MODES, help="by default each of both")
    peers: list[LlamaServer] = []

    def load(args: argparse.Namespace) -> LlamaServer:
        peers.append(LlamaServer(args))
        return peers[-1]

    try:
        runner.serve(parser.parse_args(), load)
    finally:
        for peer in peers:
            peer.close()
