"""A hand-made peer that sends arbitrary bytes, and a peer in a process of its own: `python -m
tests.support.transport.transport_peer URL HOW`."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.transport.transport_rig import KEY, WINDOW_BYTES
from transport import _windows, connect, control
from transport.base import PeerLostError, Segment

ROOT = Path(__file__).parents[3]


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def open_socket(url: str) -> socket.socket:
    """Connects to a listener and sends nothing."""
    if url.startswith("tcp:"):
        sock = socket.create_connection(address_of(url))
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(url.removeprefix("shm://"))
    sock.settimeout(20.0)
    return sock


def crc32c(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return _windows.crc32c(array.ctypes.data, len(data))


def descriptor(
    number: int,
    payload: bytes = b"",
    *,
    offset: int = 0,
    length: int | None = None,
    consumed: int = 0,
) -> bytes:
    """Returns a descriptor with valid checksums, whatever its fields say."""
    length = len(payload) if length is None else length
    fields = struct.pack("<QQQQQ", offset, length, consumed, crc32c(payload), number)
    return struct.pack(
        "<QQQIIQ24x", offset, length, consumed, crc32c(payload), crc32c(fields), number
    )


# Descriptors with valid checksums and impossible fields.
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "length 2^63": {"length": 2**63},
    "length 2^31": {"length": 2**31},
    "length -1": {"length": 2**64 - 1},
    "larger than a message": {"length": WINDOW_BYTES // 4 + 1},
    "past the end": {"offset": WINDOW_BYTES - 64, "length": 65},
    "offset 2^64-64": {"offset": 2**64 - 64, "length": 128},
    "offset 2^63": {"offset": 2**63, "length": 64},
    "not aligned": {"offset": 8, "payload": bytes(64)},
    "credit for what was never sent": {"consumed": 1},
    "credit -1": {"consumed": 2**64 - 1},
}


def authenticated(url: str, key: bytes = KEY) -> control.Session:
    return control.authenticate_to(open_socket(url), key, time.monotonic() + 20.0)


@contextlib.contextmanager
def raw_tcp_peer(url: str) -> Iterator[socket.socket]:
    """Yields the data socket of an authenticated peer that sends heartbeats."""
    session = authenticated(url)
    theirs = control.exchange_hellos(session, control.hello("tcp", {}, WINDOW_BYTES))
    data = open_socket(url)
    data.sendall(control.DATA_MAGIC + bytes.fromhex(theirs["token"]))
    assert session.receive() == {"ready": True}
    link = _windows.Link.of_socket(session.detach())
    link.watch()
    with data:
        yield data
    link.end("closed")


@contextlib.contextmanager
def child(url: str, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process that connects to url and then acts as `main` does for HOW."""
    command = [sys.executable, "-m", "tests.support.transport.transport_peer", url, how]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(url: str, how: str) -> None:
    endpoint = connect(url, key=KEY, window_bytes=WINDOW_BYTES)
    hello = np.frombuffer(b"here", np.uint8)
    endpoint.post([Segment(hello.ctypes.data, 1, 4, 4)])
    if how == "idle":
        time.sleep(60)
    with contextlib.suppress(PeerLostError):
        while True:  # answers
            frame = endpoint.poll(10.0)
            if frame is not None:
                endpoint.post([Segment(frame.address, 1, frame.num_bytes, 0)])
                endpoint.release(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
