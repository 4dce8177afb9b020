"""A program that answers requests and records what the process does with files and the network.

argv[1] is a JSON list of (request line, body). The program prints {"answers": [{"status", "code"}],
"events": [...]}. It runs Python's own event loop, whose calls audit hooks can see, and its client
connects before the recording begins.
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


async def main(calls: list[list[Any]]) -> None:
    events: list[str] = []
    is_recording = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_recording and event.startswith(WATCHED):
            events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)
    engine: Any = FakeEngine()
    answers = []
    async with HttpServer(engine, HttpSettings(port=0)) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def ask(request_line: str, body: Any) -> dict[str, Any]:
            data = b"" if body is None else json.dumps(body).encode()
            writer.write(request(data, first=f"{request_line} HTTP/1.1"))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            error = json.loads(await reader.readexactly(length)).get("error", {})
            return {"status": int(head.split()[1]), "code": error.get("code")}

        for request_line, body in calls:  # modules are imported at their first use
            await ask(request_line, body)
        is_recording = True
        answers = [await ask(request_line, body) for request_line, body in calls]
        is_recording = False
        writer.close()
    is_recording = True  # checks that the hook sees opened files
    os.close(os.open("/dev/null", os.O_RDONLY))
    is_recording = False
    assert events.pop().startswith("open ")
    assert not engine.submitted
    print(json.dumps({"answers": answers, "events": events}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
