"""A replica serves its weights to those that ask rightly, and stops when it is told to."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.models.packed_cache.in_memory import PackedBytes
from serve.models.packed_cache.layout import CHUNK_BYTES, DATA_START, Index
from serve.models.packed_cache.writer import Contents, Made
from serve.weight_peers import server as servers
from serve.weight_peers.link import WeightLink
from serve.weight_peers.pull import Pull
from serve.weight_peers.server import WINDOW_BYTES, OfferedWeights, WeightServer
from serve.weight_peers.wire import HEADER_BYTES, Area, Header, Kind, pack_header
from tests.support.models.weight_replicas import END, KEY, connected, end_of, pull, serving
from transport import connect, listen
from transport.base import PeerLostError, TransportError
from transport.messages import post_bytes

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)


@pytest.mark.parametrize(
    "message",
    [
        b"short",
        b"\x63" * HEADER_BYTES,
        pack_header(Header(Kind.PART, Area.DATA, 1, DATA_START, 64)),
        pack_header(Header(Kind.GET, Area.DATA, 1, 0, 64)),
        pack_header(Header(Kind.GET, Area.DATA, 1, END - 64, 128)),
        pack_header(Header(Kind.GET, Area.DATA, 1, DATA_START, 0)),
        pack_header(Header(Kind.GET, Area.DATA, 1, DATA_START, CHUNK_BYTES + 1)),
        pack_header(Header(Kind.GET, Area.DATA, 1, (1 << 64) - 64, 64)),
        pack_header(Header(Kind.GET, Area.TABLE, 1, 0, 3)),
        pack_header(Header(Kind.GET, Area.DATA, 1, DATA_START, 64)) + b"more",
    ],
)
def test_requests_that_no_peer_sends_end_the_connection(
    message: bytes, tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"inproc://{tmp_path}", index, data) as server:
        endpoint = connect(server.url, key=KEY)
        post_bytes(endpoint, message)
        with pytest.raises(PeerLostError):
            assert endpoint.poll(5.0) is None
        assert server.snapshot().refused == 1
        assert torch.equal(pull(index, server.url).data[DATA_START:], data[DATA_START:])


def test_a_peer_without_the_key_gets_nothing(
    tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"shm://{tmp_path}/w", index, data) as server:
        link = WeightLink(server.url, b"another key of 16 bytes")
        with pytest.raises(TransportError):
            link.connect()
        assert server.snapshot().served_bytes == 0


# -- time


def test_a_stop_does_not_wait_for_the_rate(
    tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"inproc://{tmp_path}", index, data, 32 << 10) as server:
        link = connected(server.url)
        for _ in range(2):
            link.ask(Area.DATA, DATA_START, CHUNK_BYTES)
        time.sleep(0.5)
        assert end_of(server.close, 3.0) is None


def test_a_peer_that_has_gone_does_not_wait_for_the_rate(
    tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"inproc://{tmp_path}", index, data, 32 << 10) as server:
        link = connected(server.url)
        link.ask(Area.DATA, DATA_START, CHUNK_BYTES)
        time.sleep(0.5)
        assert server.snapshot().peers == 1
        link.close()
        end_s = time.monotonic() + 5.0
        while server.snapshot().peers and time.monotonic() < end_s:
            time.sleep(0.05)
        assert server.snapshot().peers == 0


def test_others_connect_and_a_stop_comes_while_checksums_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def checksum(_: object) -> int:
        begun.set()
        stopped.wait(0.2)
        return 0

    monkeypatch.setattr("serve.models.packed_cache.writer.checksum_of", checksum)
    packed = PackedBytes(Contents([Made("x", (torch.zeros(100 * CHUNK_BYTES // 4),))]))
    listener = listen(f"inproc://{tmp_path}", key=KEY, window_bytes=WINDOW_BYTES)
    server = WeightServer(listener, OfferedWeights(packed, "x", b"{}"), None)
    first = connected(server.url)
    asking = threading.Thread(target=end_of, args=(lambda: first.describe(object),))
    asking.start()
    assert begun.wait(5.0)
    second = connected(server.url)
    end_s = time.monotonic() + 3.0
    while server.snapshot().peers < 2 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert server.snapshot().peers == 2
    second.close()
    assert end_of(server.close, 3.0) is None
    stopped.set()
    asking.join()
    assert server.snapshot().refused == 0


def test_a_peer_that_asks_for_nothing_is_left(
    tmp_path: Path, index: Index, data: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "IDLE_S", 0.3)
    with serving(f"inproc://{tmp_path}", index, data) as server:
        endpoint = connect(server.url, key=KEY)
        with pytest.raises(PeerLostError):
            assert endpoint.poll(5.0) is None
        link = connected(server.url)
        time.sleep(1.0)
        assert server.snapshot().peers == server.snapshot().refused == 0
        made = Pull(index)
        assert torch.equal(made.run([link], object)[DATA_START:], data[DATA_START:])
