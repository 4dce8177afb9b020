"""A program that runs a server in a process with a low limit on open files.

It prints its port and reads commands from stdin: "hog" opens files up to the limit and "free"
closes them. Each command is answered with a line: the command and the number of open files.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from typing import Any

import uvloop

from serve.http import HttpServer, HttpSettings
from tests.support.http.fake_engine import FakeEngine

NUM_FILES = 120


def open_all() -> list[int]:
    files: list[int] = []
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return files


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    loop = asyncio.get_running_loop()
    files: list[int] = []
    engine: Any = FakeEngine()
    async with HttpServer(engine, HttpSettings(port=0)) as server:
        print(server.url.rpartition(":")[2], flush=True)
        while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if command == "hog":
                files = open_all()
            else:
                while files:
                    os.close(files.pop())
            print(command, len(files), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
