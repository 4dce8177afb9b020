"""A machine in the middle of a tcp connection: it sees all bytes and may change them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.transport.transport_peer import address_of
from transport import control

_HEAD_BYTES, _TAG_BYTES = 4, 16  # of a record: transport/csrc/records.h
Change = Callable[[bytes], bytes | None]


def record_bytes(head: bytes) -> int:
    return _HEAD_BYTES + int.from_bytes(head[:_HEAD_BYTES], "little") + _TAG_BYTES


class RecordProxy:
    """Passes on what the connecting end and the listener send.

    change_control gets each control message of the connecting end, change_record each of its
    records; both return what is sent instead, None to close the data connection.
    """

    def __init__(self, url: str) -> None:
        self.change_control: Change = lambda message: message
        self.change_record: Change = lambda record: record
        self.sent_to_listener = b""  # on the data connection
        self.records_to_client: list[bytes] = []
        self._target = address_of(url)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for relay in (self._to_listener, self._to_client):
                    threading.Thread(target=self._run, args=(relay, near, far), daemon=True).start()

    def _run(self, relay: Callable[..., None], near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            relay(near, far)
        for sock in (near, far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _to_listener(self, near: socket.socket, far: socket.socket) -> None:
        magic = _exactly(near, len(control.MAGIC))
        far.sendall(magic)
        if magic == control.DATA_MAGIC:
            far.sendall(_exactly(near, control.TOKEN_BYTES))
            while True:
                head = _exactly(near, _HEAD_BYTES)
                record = head + _exactly(near, record_bytes(head) - _HEAD_BYTES)
                self.sent_to_listener += record
                changed = self.change_record(record)
                if changed is None:
                    return
                far.sendall(changed)
        for _ in ("nonce", "proof"):
            far.sendall(_exactly(near, 32))
        length = _exactly(near, 2)
        body = _exactly(near, int.from_bytes(length, "big"))
        changed = self.change_control(body)
        assert changed is not None
        far.sendall(len(changed).to_bytes(2, "big") + changed)
        while data := near.recv(65536):
            far.sendall(data)

    def _to_client(self, near: socket.socket, far: socket.socket) -> None:
        while data := far.recv(65536):
            self.records_to_client.append(data)
            near.sendall(data)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := sock.recv(count - len(data))):
            raise EOFError
        data += part
    return data


@contextlib.contextmanager
def proxy_to(url: str) -> Iterator[RecordProxy]:
    proxy = RecordProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
