"""`serve run` and `serve front` as processes of this machine, for measurements."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from bench.cluster.cut_proxy import CutProxy
from serve.machine import free_port


@dataclass
class Server:
    """A `serve run`. proxy: set where it can be cut off; its URL is then the proxy's."""

    port: int
    options: tuple[str, ...]
    proxy: CutProxy | None = None
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.proxy is None else self.proxy.url

    async def start(self) -> None:
        command = [sys.executable, "-m", "serve", "run", "--port", str(self.port), *self.options]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--log-level", "error", stdout=asyncio.subprocess.DEVNULL
        )

    async def end(self, number: int) -> float:
        """Sends a signal and waits for the end; returns the seconds that it took."""
        assert self.process is not None
        began_s = time.perf_counter()
        self.process.send_signal(number)
        await self.process.wait()
        return time.perf_counter() - began_s

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()


async def start_front(urls: list[str], *options: str) -> tuple[asyncio.subprocess.Process, str]:
    """Returns the process and its URL, once it is ready."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serve", "front", *urls, "--port", str(port), *options),
        *("--log-level", "error"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    await until_ready(url)
    return process, url


async def until_ready(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for _ in range(600):
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} is not ready")
