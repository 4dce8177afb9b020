"""A program: a server, the bodies in argv[1], and what the process did with files and the network.

Prints {"statuses": [...], "codes": [...], "events": [...]}. The loop is Python's own, whose calls
the interpreter tells to audit hooks, and the client's connection is there before it listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from serve.http import HttpServer, HttpSettings
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import request

WATCHED = ("open", "os.", "socket.connect", "socket.getaddrinfo", "subprocess.", "urllib.", "glob.")


async def main(asked: list[list[Any]]) -> None:
    events: list[str] = []
    is_on = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event.startswith(WATCHED):
            events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)
    engine: Any = FakeEngine()
    answers = []
    async with HttpServer(engine, HttpSettings(port=0)) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def ask(first: str, body: Any) -> dict[str, Any]:
            data = b"" if body is None else json.dumps(body).encode()
            writer.write(request(data, first=f"{first} HTTP/1.1"))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            error = json.loads(await reader.readexactly(length)).get("error", {})
            return {"status": int(head.split()[1]), "code": error.get("code")}

        for first, body in asked:  # what is imported at its first use
            await ask(first, body)
        is_on = True
        answers = [await ask(first, body) for first, body in asked]
        is_on = False
        writer.close()
    is_on = True  # the hook does see what it is there for
    os.close(os.open("/dev/null", os.O_RDONLY))
    is_on = False
    assert events.pop().startswith("open ")
    assert not engine.submitted
    print(json.dumps({"answers": answers, "events": events}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
