"""A TCP proxy before a server, which can break its connections as a dying machine does."""

from __future__ import annotations

import asyncio
import contextlib


class CutProxy:
    """Passes bytes to a port of this machine. cut() resets all connections and refuses new ones;
    freeze() passes nothing on and keeps them open; heal() ends both."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def freeze(self) -> None:
        self._flows.clear()

    async def heal(self) -> None:
        self._flows.set()
        if self._server is None:
            await self.start()

    async def stop(self) -> None:
        self._flows.set()
        if self._server is not None:
            await self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(upstream)
            for pair in ((reader, upstream), (upstream_reader, writer)):
                task = asyncio.create_task(self._pump(*pair))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except OSError:
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
        self._writers.discard(writer)
