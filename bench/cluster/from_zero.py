"""The first token of a model of `serve cluster` that has no replica.

`python -m bench.cluster.from_zero --model random:llama-1b` starts `serve cluster --min-replicas 0`
on a Ray cluster of this machine alone. Each round waits until the idle replica has been taken away,
which takes a minute, and times a request to its first token. It needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import aiohttp

from bench.cluster.models import ask
from bench.common.checkpoints import model_directory
from serve.cli.config_file import parse_size
from serve.config import EngineConfig
from serve.machine import free_port

_READY = "mergestep:front_replica_ready"
_LIMIT_S = 300.0


async def first_token_s(session: aiohttp.ClientSession, name: str) -> float:
    answer = await ask(session, name, "Tell me a joke", 4)
    assert answer.ttft_s is not None, answer.failure
    return answer.ttft_s


async def until_none_is_left(session: aiohttp.ClientSession) -> float:
    """Returns the seconds that it took."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _LIMIT_S:
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        if not any(line.startswith(_READY) and float(line.split()[-1]) for line in lines):
            await asyncio.sleep(5.0)  # until its process has ended as well
            return time.monotonic() - began_s
        await asyncio.sleep(0.5)
    raise RuntimeError("a replica is left")


async def until_listening(session: aiohttp.ClientSession) -> None:
    for _ in range(600):
        try:
            async with session.get("/live"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise RuntimeError("serve cluster does not listen")


async def measure(port: int, name: str, rounds: int) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        await until_listening(session)
        print(f"first replica of all: {await first_token_s(session, name):.2f} s", flush=True)
        found = []
        for _ in range(rounds):
            waited_s = await until_none_is_left(session)
            found.append(await first_token_s(session, name))
            print(f"none left after {waited_s:.0f} s; {found[-1]:.2f} s", flush=True)
        middle = statistics.median(found)
        print(f"first token from zero: {middle:.2f} s ({min(found):.2f} to {max(found):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory or random:SHAPE; default: the embedded one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=parse_size, default=256 << 20)
    given = parser.parse_args()
    found = model_directory(given.model)
    port = free_port()
    name = EngineConfig.from_settings(found).model_name
    command = [sys.executable, "-m", "serve", "cluster", *([found] if found else [])]
    command += ["--ray-address", "local", "--min-replicas", "0", "--max-replicas", "1"]
    command += ["--port", str(port), "--kv-cache-bytes", str(given.kv_cache_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(measure(port, name, given.rounds))
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
