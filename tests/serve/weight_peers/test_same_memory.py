"""A replica uses the memory of a peer on the same machine, if nothing can change it any more."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.models.packed_cache.in_memory import Found, PackedBytes
from serve.models.packed_cache.layout import CHUNK_BYTES, DATA_START, DamagedCache, Index
from serve.models.packed_cache.region import HUGE, huge_bytes
from serve.models.packed_cache.shared_memory import (
    Arena,
    NotShared,
    SharedMemory,
    is_on_huge_pages,
    map_shared,
    try_arena,
)
from serve.weight_peers.link import WeightLink
from serve.weight_peers.pull import Pull
from serve.weight_peers.same_memory import use_shared
from serve.weight_peers.server import WINDOW_BYTES, OfferedWeights, WeightServer
from tests.support.models.weight_replicas import END, KEY, connected, serving
from transport import listen, take_shared
from transport.base import TransportError

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(
        native_library.is_available() and try_arena(END) is None,
        reason="the system has no huge pages of a memfd",
    ),
]


def shared_copy(data: torch.Tensor) -> SharedMemory:
    arena = try_arena(END)
    assert arena is not None
    arena.grow(END)
    arena.data[DATA_START:END] = data[DATA_START:END]
    return arena.seal()


@pytest.fixture(scope="module")
def shared(data: torch.Tensor) -> SharedMemory:
    return shared_copy(data)


@contextlib.contextmanager
def sharing(url: str, index: Index, shared: SharedMemory) -> Iterator[WeightServer]:
    listener = listen(url, key=KEY, window_bytes=WINDOW_BYTES, shared=shared)
    packed = PackedBytes(Found(index, shared.data, shared))
    server = WeightServer(listener, OfferedWeights(packed, "x", b"{}"), None)
    try:
        yield server
    finally:
        server.close()


def taken(url: str) -> int:
    link = connected(url)
    fd = link.take_shared()
    assert fd is not None and link.take_shared() is None
    link.close()
    return fd


def is_closed(fd: int) -> bool:
    return not os.path.exists(f"/proc/self/fd/{fd}")


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_memory_is_the_peers_and_takes_none(
    tmp_path: Path, index: Index, data: torch.Tensor, shared: SharedMemory
) -> None:
    with sharing(f"shm://{tmp_path}/w", index, shared) as server:
        used = use_shared(taken(server.url), index, object)
        assert server.snapshot().served_bytes == 0
    assert os.path.sameopenfile(used.fileno(), shared.fileno())
    assert torch.equal(used.data[DATA_START:END], data[DATA_START:END])
    assert is_on_huge_pages(used.data, END)
    assert huge_bytes(used.data.data_ptr()) == -(-END // HUGE) * HUGE - DATA_START


def test_a_change_here_is_not_seen_there(data: torch.Tensor, shared: SharedMemory) -> None:
    mine = map_shared(os.dup(shared.fileno()), END)
    mine.data[DATA_START] ^= 1
    assert mine.data[DATA_START] != data[DATA_START] == shared.data[DATA_START]


def test_sealed_memory_cannot_be_changed(shared: SharedMemory) -> None:
    for change in (
        lambda: os.pwrite(shared.fileno(), b"x", DATA_START),
        lambda: os.ftruncate(shared.fileno(), 0),
        lambda: os.ftruncate(shared.fileno(), 2 * END),
        lambda: mmap.mmap(shared.fileno(), 4096),
    ):
        with pytest.raises(PermissionError):
            change()


PEER = """
import ctypes, sys, time
from serve.models.packed_cache.layout import DATA_START
from serve.models.packed_cache.shared_memory import try_arena
from transport import listen
end = int(sys.argv[2])
arena = try_arena(end)
arena.grow(end)
arena.data[DATA_START:end] = 7
listener = listen(sys.argv[1], key=sys.argv[3].encode(), shared=arena.seal())
print("listens", flush=True)
kept = [listener.accept(60.0)]
time.sleep(60.0)
"""


def test_the_memory_outlives_a_peer_that_is_killed(tmp_path: Path) -> None:
    """It is killed when the memory is handed over, before a byte of it was compared."""
    url, wanted = f"shm://{tmp_path}/w", torch.full((END,), 7, dtype=torch.uint8)
    checksum, base = native_library.library().checksum, wanted.data_ptr()
    spans = [(at, min(CHUNK_BYTES, END - at)) for at in range(DATA_START, END, CHUNK_BYTES)]
    index = Index(END, [], [checksum(base + at, num_bytes) for at, num_bytes in spans])
    command = [sys.executable, "-c", PEER, url, str(END), KEY.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None and peer.stdout.readline() == b"listens\n"
        link = connected(url)
        fd = link.take_shared()
        peer.kill()
        peer.wait()
        assert fd is not None
        used = use_shared(fd, index, object)
        link.close()
    assert torch.equal(used.data[DATA_START:END], wanted[DATA_START:])


def test_without_the_key_there_is_no_memory(
    tmp_path: Path, index: Index, shared: SharedMemory
) -> None:
    with sharing(f"shm://{tmp_path}/w", index, shared) as server:
        before = open_fds()
        link = WeightLink(server.url, b"another key of 16 bytes")
        with pytest.raises(TransportError):
            link.connect()
        assert link.take_shared() is None
        assert open_fds() == before


def test_a_connection_that_ends_closes_what_nobody_took(
    tmp_path: Path, index: Index, shared: SharedMemory
) -> None:
    with sharing(f"shm://{tmp_path}/w", index, shared) as server:
        link = connected(server.url)
        endpoint = link._endpoint
        assert endpoint is not None
        (fd,) = endpoint.shared_fds  # type: ignore[attr-defined]
        link.close()
        assert is_closed(fd)
        assert take_shared(endpoint) is None


def test_a_listener_that_shares_nothing_gives_no_memory(
    tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"shm://{tmp_path}/w", index, data) as server:
        link = connected(server.url)
        assert link.take_shared() is None
        link.close()


def test_only_shm_shares(shared: SharedMemory) -> None:
    for url in ("tcp://127.0.0.1:0", "inproc://x"):
        with pytest.raises(ValueError, match="over shm only"):
            listen(url, key=KEY, shared=shared)


# -- peers that do wrong


def test_damaged_bytes_are_not_used(index: Index, data: torch.Tensor) -> None:
    wrong = data.clone()
    wrong[DATA_START + CHUNK_BYTES + 77] ^= 1
    damaged = shared_copy(wrong)
    fd = os.dup(damaged.fileno())
    with pytest.raises(DamagedCache, match="have another checksum"):
        use_shared(fd, index, object)
    gc.collect()
    assert is_closed(fd)


def memfd(num_bytes: int, seals: int) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, 1033, seals)
    return fd


def writable_by_others() -> int:
    fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(fd, END)
    os.fchmod(fd, 0o666)
    return fd


SHRINK, GROW, WRITE = 2, 4, 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: memfd(END, 0), "could change it"),
        (lambda: memfd(END, 1 | SHRINK | GROW), "could change it"),
        (lambda: memfd(END, 1 | WRITE | GROW), "could change it"),
        (lambda: memfd(END - 1, 1 | SHRINK | GROW | WRITE), "too small"),
        (lambda: memfd(END, 1 | SHRINK | GROW | WRITE), "no huge pages"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "too small"),
        (lambda: os.open("/proc/self", os.O_RDONLY), "too small"),
        (lambda: os.pipe2(0)[0], "too small"),
        (writable_by_others, "could change it"),
    ],
)
def test_memory_that_is_not_as_it_must_be_is_left(make, message: str) -> None:
    fd = make()
    with pytest.raises(NotShared, match=message):
        map_shared(fd, END)
    assert is_closed(fd)


def test_a_stop_ends_the_comparison(index: Index, shared: SharedMemory) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_shared(os.dup(shared.fileno()), index, stop)


# -- weights that came over a link


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
def test_what_was_copied_is_shared_with_others(
    scheme: str, tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    with serving(f"{scheme}://{tmp_path}/w", index, data) as server:
        pull = Pull(index, is_shared=True)
        got = pull.run([connected(server.url)], object)
    shared = pull.share()
    assert shared is not None and shared.data.data_ptr() == got.data_ptr()
    used = use_shared(os.dup(shared.fileno()), index, object)
    assert torch.equal(got[DATA_START:], data[DATA_START:])
    assert torch.equal(used.data[DATA_START:END], data[DATA_START:])


def test_where_there_are_no_huge_pages_nothing_is_shared(
    index: Index, data: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.models.packed_cache.shared_memory._COLLAPSE", 9999)
    with serving(f"inproc://{tmp_path}/w", index, data) as server:
        pull = Pull(index, is_shared=True)
        got = pull.run([connected(server.url)], object)
    assert pull.share() is None
    assert torch.equal(got[DATA_START:], data[DATA_START:])


def test_memory_of_which_a_page_is_not_huge_is_not_shared(
    index: Index, data: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow = Arena.grow

    def fail_later(self: Arena, end: int) -> None:
        with monkeypatch.context() as changed:
            if end > DATA_START + CHUNK_BYTES:
                changed.setattr("serve.models.packed_cache.shared_memory._COLLAPSE", 9999)
            grow(self, end)

    monkeypatch.setattr(Arena, "grow", fail_later)
    with serving(f"inproc://{tmp_path}/w", index, data) as server:
        pull = Pull(index, is_shared=True)
        got = pull.run([connected(server.url)], object)
    assert pull.share() is None
    assert torch.equal(got[DATA_START:], data[DATA_START:])


def test_a_child_does_not_keep_memory_from_being_sealed(data: torch.Tensor) -> None:
    arena = try_arena(END)
    assert arena is not None
    arena.grow(END)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert arena.seal().fileno() >= 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
