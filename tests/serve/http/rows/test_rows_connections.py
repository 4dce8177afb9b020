"""Rows of the catalogue about slow readers, many connections, exhausted files and dead peers.

bench measures the full numbers: 10,000 idle connections and their memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from serve.http.edge.connection import Connection
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, request
from tests.support.http.running_server import Served, run_with_server

pytestmark = [
    pytest.mark.timing,
    pytest.mark.usefixtures("nothing_in_the_log"),
]

GET_HEALTH = request(b"", first="GET /health HTTP/1.1", kind=None, length=None)


@contextlib.contextmanager
def small_window(port: int) -> Iterator[socket.socket]:
    """Opens a connection whose buffers hold only a few kilobytes of unread data."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    with sock:
        sock.connect_ex(("127.0.0.1", port))
        yield sock


@pytest.mark.row("C9")
def test_a_reader_of_ten_bytes_at_a_time_is_aborted() -> None:
    """A few bytes do not extend the write timeout; most of the buffer must have gone."""

    async def check(served: Served) -> None:
        loop = asyncio.get_running_loop()
        with small_window(served.port) as slow:
            await loop.sock_sendall(slow, request(json.dumps({**BODY, "stream": True}).encode()))
            began_s = time.monotonic()
            num_read = 0
            with contextlib.suppress(ConnectionResetError):
                while not served.engine.aborted:
                    num_read += len(await loop.sock_recv(slow, 10))
                    await asyncio.sleep(0.02)
                    assert time.monotonic() - began_s < 10
            assert num_read > 50
            assert not served.engine.running
            assert (await served.events(CHAT, {**BODY, "max_tokens": 5}))[-1] == "[DONE]"

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.5)


@pytest.mark.row("C8")
def test_the_unread_output_of_a_stalled_reader_is_bounded() -> None:
    """The server stops reading tokens from the engine when its buffers are full."""

    async def check(served: Served) -> None:
        loop = asyncio.get_running_loop()
        with small_window(served.port) as stalled:
            await loop.sock_sendall(stalled, request(json.dumps({**BODY, "stream": True}).encode()))
            before, num_tokens = -1, 0
            while before != num_tokens or not num_tokens:
                before = num_tokens
                await asyncio.sleep(0.3)
                num_tokens = next(iter(served.engine.running))._num_output
            bytes_each = 150  # the size of an event with one character
            assert num_tokens * bytes_each < 512 << 10

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=30, send_buffer_bytes=65536)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def connect_all(port: int, count: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.setblocking(False)
    await asyncio.gather(*(loop.sock_connect(sock, ("127.0.0.1", port)) for sock in socks))
    return socks


@pytest.mark.row("C10", "C11")
@pytest.mark.parametrize("is_half_head", [False, True])
def test_silent_connections_and_incomplete_heads(is_half_head: bool) -> None:
    """Each of 1,000 connections costs at most 25 kB. Health is answered at once, and deadlines end
    the connections."""
    count = 1000

    async def check(served: Served) -> None:
        assert (await served.raw(GET_HEALTH)).status == 200
        before = resident_bytes()
        socks = await connect_all(served.port, count)
        if is_half_head:
            for sock in socks:
                sock.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        connections = served.server.app.context.counters.num_connections
        await served.until(lambda: connections() >= count)
        assert resident_bytes() - before < count * 25_000  # both ends are in this process
        seconds = []
        for _ in range(20):
            began_s = time.monotonic()
            assert (await served.raw(GET_HEALTH)).status == 200
            seconds.append(time.monotonic() - began_s)
        assert sorted(seconds)[10] < 0.02
        assert (await served.post(CHAT, BODY))[0] == 200
        await served.until(lambda: connections() < 10, timeout_s=15)
        for sock in socks:
            sock.close()

    settings = {"head_timeout_s" if is_half_head else "first_request_timeout_s": 2.0}
    run_with_server(FakeEngine(), check, **settings)


@pytest.mark.row("C12")
def test_a_storm_of_connections() -> None:
    """The kernel's backlog holds a burst of connections, so no client repeats its SYN."""
    count = 3000

    async def check(served: Served) -> None:
        connections = served.server.app.context.counters.num_connections
        began_s = time.monotonic()
        socks = await connect_all(served.port, count)
        assert time.monotonic() - began_s < 2
        await served.until(lambda: connections() >= count)
        assert time.monotonic() - began_s < 2
        assert (await served.raw(GET_HEALTH)).status == 200
        for sock in socks:
            sock.close()
        await served.until(lambda: connections() < 10, timeout_s=15)

    with open("/proc/sys/net/core/somaxconn") as file:
        if int(file.read()) < 4096:
            pytest.skip("the kernel does not hold so many connections")
    run_with_server(FakeEngine(), check)


# ---- no free files


class FewFiles:
    """A client of few_files_server.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self.address = "127.0.0.1", int(self._out.readline())

    def command(self, command: str) -> int:
        self._in.write(f"{command}\n")
        self._in.flush()
        return int(self._out.readline().split()[1])

    def connect(self, count: int) -> list[socket.socket]:
        return [socket.create_connection(self.address, timeout=3) for _ in range(count)]

    def health(self, sock: socket.socket | None = None) -> int | None:
        """Returns the status, or None if the connection was closed."""
        try:
            connection = sock or socket.create_connection(self.address, timeout=3)
            connection.sendall(GET_HEALTH)
            data = connection.recv(4096)
        except ConnectionError:
            return None
        finally:
            if sock is None:
                connection.close()
        return int(data.split()[1]) if data else None

    def until_health(self) -> float:
        """Waits until a new connection is answered and returns the seconds."""
        began_s = time.monotonic()
        while self.health() != 200:
            assert time.monotonic() - began_s < 10
            time.sleep(0.05)
        return time.monotonic() - began_s


@pytest.fixture
def few_files() -> Iterator[FewFiles]:
    root = Path(__file__).parents[4]
    with subprocess.Popen(
        [sys.executable, root / "tests/support/http/few_files_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
    ) as process:
        server = FewFiles(process)
        yield server
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.mark.row("C13")
def test_no_free_files(few_files: FewFiles) -> None:
    """Without free files, new connections wait and open ones are answered; then all continue."""
    open_connection = few_files.connect(1)[0]
    assert few_files.health(open_connection) == 200
    assert few_files.command("hog") > 10
    waiting = few_files.connect(20)
    for _ in range(3):
        assert few_files.health(open_connection) == 200
    assert few_files.command("free") == 0
    few_files.until_health()
    assert few_files.health(open_connection) == 200
    for sock in [open_connection, *waiting]:
        sock.close()


@pytest.mark.row("C13")
def test_more_connections_than_files(few_files: FewFiles) -> None:
    """Spare connections are kept for health checks, and no client holds one for long."""
    connections = few_files.connect(400)
    assert few_files.until_health() < 5
    for _ in range(3):  # an answered client releases its spare connection, too
        few_files.until_health()
    for sock in connections:
        sock.close()
    few_files.until_health()


@pytest.mark.row("C15")
def test_dead_peers_are_detected() -> None:
    """The kernel ends a connection whose data is not acknowledged within the write timeout, and
    probes silent ones. The test cannot cut a link, so it reads the options of accepted sockets."""
    accepted = []

    class RecordingConnection(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            tcp_options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
            options = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in tcp_options]
            accepted.append([sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *options])

    async def check(served: Served) -> None:
        assert (await served.raw(GET_HEALTH)).status == 200

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.http.edge.connection.Connection", RecordingConnection)
        run_with_server(FakeEngine(), check, write_timeout_s=25)
    assert accepted == [[1, 25_000, 10, 5]]


@pytest.mark.row("C15")
def test_a_buffer_that_stays_full_ends_its_stream() -> None:
    """A receive window of zero bytes stands for a dead peer of a fast stream."""

    async def check(served: Served) -> None:
        loop = asyncio.get_running_loop()
        with small_window(served.port) as stalled:
            body = json.dumps({**BODY, "stream": True}).encode()
            await loop.sock_sendall(stalled, request(body))
            await served.until(lambda: len(served.engine.running) == 1)
            assert await served.until(lambda: not served.engine.running, timeout_s=10) > 0.3
            assert len(served.engine.aborted) == 1
            await served.until(lambda: served.server.app.num_calls == 0)

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.4)
