"""A program: a server whose process may open few files. It prints its port, then obeys its stdin.

"hog" opens files until no more may be opened, "free" closes them; each is answered with a line.
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
    held: list[int] = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return held


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    loop = asyncio.get_running_loop()
    held: list[int] = []
    engine: Any = FakeEngine()
    async with HttpServer(engine, HttpSettings(port=0)) as server:
        print(server.url.rpartition(":")[2], flush=True)
        while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if command == "hog":
                held = open_all()
            else:
                while held:
                    os.close(held.pop())
            print(command, len(held), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
