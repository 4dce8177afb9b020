"""One of several client processes, which bench/load/client/processes.py starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

from bench.load.client.health import Watch, raise_file_limit
from bench.load.client.processes import read_frame, write_frame
from bench.load.client.sender import Sender
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.workload.offered_load import Item
from bench.load.workload.work import Work

PROGRESS_S = 0.2


async def _pipes() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns standard input and output. Later prints go to standard error."""
    loop = asyncio.get_running_loop()
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), output
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def _main() -> None:
    reader, writer = await _pipes()
    task = await read_frame(reader)
    process: int = task["process"]
    items = [Item(**{**item, "work": Work(**item["work"])}) for item in task["items"]]
    settings = task["settings"]
    settings["left_out"] = tuple(settings["left_out"])
    raise_file_limit()
    async with ServerTarget(ServerSettings(**settings)) as target:
        async with Watch(stop_gc=True) as watch:
            await write_frame(writer, {"ready": True})
            start = await read_frame(reader)
            sender = Sender(
                target,
                items,
                start_s=start["start_s"],
                grace_s=task["grace_s"],
                max_concurrency=task["max_concurrency"],
                process=process,
            )
            tasks = [
                asyncio.create_task(_report(sender, writer)),
                asyncio.create_task(_stop_on_message(sender, reader)),
            ]
            await sender.run()
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _send_progress(sender, writer)
        health = watch.health(process, len(items), target.max_connections, target.num_resent)
    answer = {
        "health": health,
        "records": sender.records,
        "probes": sender.probes,
    }
    await write_frame(writer, answer)
    writer.close()


async def _send_progress(sender: Sender, writer: asyncio.StreamWriter) -> None:
    await write_frame(writer, {"progress": sender.progress()})


async def _report(sender: Sender, writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        await _send_progress(sender, writer)


async def _stop_on_message(sender: Sender, reader: asyncio.StreamReader) -> None:
    """Stops the sender at the parent's next message, which can only mean to stop, or when the pipe
    closes."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await read_frame(reader)
    sender.stop()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        import uvloop

        run: Any = uvloop.run
    except ImportError:
        run = asyncio.run
    with contextlib.suppress(asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
        run(_main())


if __name__ == "__main__":
    main()
