"""Block I/O delivers blocks as they were written, whatever the kernel grants. Covers io_uring
and threads, continuations, errors, the choice between them, and the checksum of a page."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
import time

import pytest

from memory.tiers import direct_io
from memory.tiers.block_file import ALIGNMENT, RingFile, ThreadFile, Transfer
from memory.tiers.direct_io import (
    IO_CHOICES,
    choose_io,
    choose_read_io,
    open_block_file,
    open_direct,
    wait_for,
)
from ops.cpu import native_library
from tests.support.memory.faulty_storage import Pages

BLOCK = 4 * ALIGNMENT


def has_ring(tmp_path) -> bool:
    try:
        return choose_io(tmp_path, "io_uring") == "io_uring"
    except OSError:
        return False


@pytest.fixture(params=["io_uring", "sqpoll", "threads"])
def io(request, tmp_path):
    if request.param != "threads" and not has_ring(tmp_path):
        pytest.skip("no io_uring here")
    return request.param


@pytest.fixture
def pages():
    return Pages(BLOCK, 256)


def open_at(path, io="threads", depth=8):
    fd, is_direct = open_direct(path, os.O_RDWR | os.O_CREAT)
    return open_block_file(fd, is_direct=is_direct, depth=depth, io=io)


@pytest.mark.parametrize("is_registered", [False, True])
def test_many_blocks_in_one_batch(tmp_path, io, pages, is_registered):
    """A batch is larger than the queue, and half of it is in registered memory."""
    file = open_at(tmp_path / "f", io)
    if is_registered and not file.register([(pages.at(64), 64 * BLOCK)]):
        assert io == "threads" or os.geteuid() != 0  # a limit on locked memory
    for i in range(128):
        pages.fill(i, b"block %d;" % i)
    wait_for(file.write, [(pages.at(i), BLOCK, i * BLOCK) for i in range(128)])
    wait_for(file.read, [(pages.at(255 - i), BLOCK, i * BLOCK) for i in range(128)])
    assert all(pages.holds(255 - i, b"block %d;" % i) for i in range(128))
    file.flush()
    file.close()
    file.close()


def test_reads_and_writes_from_several_threads(tmp_path, io, pages):
    file = open_at(tmp_path / "f", io)
    failures = []

    def work(n):
        try:
            for turn in range(20):
                pages.fill(n, b"%d at %d " % (n, turn))
                wait_for(file.write, [(pages.at(n), BLOCK, n * BLOCK)])
                wait_for(file.read, [(pages.at(128 + n), BLOCK, n * BLOCK)])
                assert pages.holds(128 + n, b"%d at %d " % (n, turn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert not failures


def test_errors_carry_their_errno(tmp_path, io, pages):
    """Reading beyond the end gives EIO, a file not open for writing EBADF, and so does a closed
    one."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * BLOCK)
    fd, is_direct = open_direct(path, os.O_RDONLY)
    file = open_block_file(fd, is_direct=is_direct, io=io)
    with pytest.raises(OSError, match="ends inside") as raised:
        wait_for(file.read, [(pages.at(0), BLOCK, BLOCK)])
    assert raised.value.errno == errno.EIO
    with pytest.raises(OSError, match="Bad file") as raised:
        wait_for(file.write, [(pages.at(0), BLOCK, 0)])
    assert raised.value.errno == errno.EBADF
    wait_for(file.read, [(pages.at(1), BLOCK, 0)])
    assert pages.holds(1, b"x")
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        wait_for(file.read, [(pages.at(0), BLOCK, 0)])


def test_a_callback_that_raises_stops_no_other_transfer(tmp_path, io, pages, caplog):
    file = open_at(tmp_path / "f", io)
    file.write([Transfer(pages.at(0), BLOCK, 0, lambda error: 1 / 0)])
    wait_for(file.write, [(pages.at(1), BLOCK, BLOCK)])
    file.close()
    assert "ZeroDivisionError" in caplog.text


class HungRing:
    """Accepts every transfer and completes them when `release` is set."""

    def __init__(self):
        self.release, self._tags = threading.Event(), []

    def submit(self, fields):
        self._tags += fields[::5]
        return len(fields) // 5

    def reap(self, at_least, timeout_s):
        if not self.release.wait(timeout_s):
            return []
        ended, self._tags = self._tags, []
        return [(tag, BLOCK) for tag in ended]


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["ring", "threads"])
def test_a_timed_out_close_reports_transfers_in_flight(tmp_path, pages, kind):
    """One transfer hangs and another waits behind it; the waiting one never touches its memory."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    hung = HungRing()
    if kind == "ring":
        file = RingFile(fd, is_direct=False, depth=1, ring=hung)
    else:

        def pwrite(fd, buffers, offset):
            hung.release.wait()
            return os.pwritev(fd, buffers, offset)

        file = ThreadFile(fd, is_direct=False, depth=1, pwrite=pwrite)
    ended = [queue.SimpleQueue(), queue.SimpleQueue()]
    file.write([Transfer(pages.at(i), BLOCK, i * BLOCK, ended[i].put) for i in range(2)])
    began_s = time.monotonic()
    assert not file.close(0.2)
    assert time.monotonic() - began_s < 1.0
    assert ended[0].empty() and ended[1].get(timeout=5).errno == errno.ECANCELED
    assert not file.close(0.2)
    hung.release.set()
    assert ended[0].get(timeout=5) is None
    file._thread.join() if kind == "ring" else file._threads[0].join()
    assert file.close()
    assert kind == "ring" or os.path.getsize(tmp_path / "f") == BLOCK
    os.close(fd)


class FaultyRing:
    """Shortens transfers for the kernel or returns EAGAIN, as `plan` says by transfer number."""

    def __init__(self, ring, plan):
        self._ring, self._plan, self._again, self._number = ring, plan, [], 0

    def submit(self, fields):
        changed = []
        for i in range(0, len(fields), 5):
            tag, is_write, address, length, offset = fields[i : i + 5]
            fault = self._plan(self._number)
            self._number += 1
            if fault == "half":
                length = max(ALIGNMENT, length // 2 // ALIGNMENT * ALIGNMENT)
            elif fault:
                self._again.append((tag, -fault))
                continue
            changed += (tag, is_write, address, length, offset)
        taken = self._ring.submit(changed)
        assert taken == len(changed) // 5
        return len(fields) // 5

    def reap(self, at_least, timeout_s):
        again, self._again = self._again, []
        return again or self._ring.reap(at_least, timeout_s)


def ring_with(path, plan, depth=4):
    fd, is_direct = open_direct(path, os.O_RDWR | os.O_CREAT)
    ring = FaultyRing(native_library.library().IoRing(fd, depth, False, False), plan)
    return RingFile(fd, is_direct=is_direct, depth=depth, ring=ring)


def threads_with(path, plan):
    fd, is_direct = open_direct(path, os.O_RDWR | os.O_CREAT)
    count = iter(range(10**6))

    def changed(call):
        def run(fd, buffers, offset):
            fault = plan(next(count))
            if fault == "half":
                (buffer,) = buffers
                size = max(ALIGNMENT, len(buffer) // 2 // ALIGNMENT * ALIGNMENT)
                return call(fd, [memoryview(buffer)[:size]], offset)
            if fault:
                raise OSError(fault, os.strerror(fault))
            return call(fd, buffers, offset)

        return run

    pread, pwrite = changed(os.preadv), changed(os.pwritev)
    return ThreadFile(fd, is_direct=is_direct, depth=2, pread=pread, pwrite=pwrite)


@pytest.mark.parametrize("make", [ring_with, threads_with])
@pytest.mark.parametrize("fault", ["half", errno.EAGAIN, errno.EINTR])
def test_short_and_interrupted_transfers_are_continued(tmp_path, pages, make, fault):
    if make is ring_with and not has_ring(tmp_path):
        pytest.skip("no io_uring here")
    file = make(tmp_path / "f", lambda number: fault if number % 3 else None)
    for i in range(20):
        pages.fill(i, b"part %d." % i)
    wait_for(file.write, [(pages.at(i), BLOCK, i * BLOCK) for i in range(20)])
    wait_for(file.read, [(pages.at(100 + i), BLOCK, i * BLOCK) for i in range(20)])
    file.close()
    assert all(pages.holds(100 + i, b"part %d." % i) for i in range(20))


@pytest.mark.parametrize("make", [ring_with, threads_with])
@pytest.mark.parametrize(
    ("fault", "number"),
    [(errno.EAGAIN, errno.EIO), (errno.ENOSPC, errno.ENOSPC), (errno.EIO, errno.EIO)],
)
def test_a_persistent_fault_is_an_error(tmp_path, pages, make, fault, number):
    if make is ring_with and not has_ring(tmp_path):
        pytest.skip("no io_uring here")
    file = make(tmp_path / "f", lambda _: fault)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        wait_for(file.write, [(pages.at(0), BLOCK, 0)])
    assert raised.value.errno == number
    file.close()


def test_an_unaligned_short_transfer_resumes_at_a_block_boundary(tmp_path, pages):
    """Direct I/O cannot continue in the middle of a block."""
    calls = []

    def pwrite(fd, buffers, offset):
        calls.append(offset)
        return 5000 if len(calls) == 1 else os.pwritev(fd, buffers, offset)

    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    file = ThreadFile(fd, is_direct=True, depth=1, pwrite=pwrite)
    wait_for(file.write, [(pages.at(0), BLOCK, 0)])
    file.close()
    assert calls == [0, 4096]


def test_unaligned_transfers_are_our_bug(pages):
    with pytest.raises(AssertionError):
        Transfer(pages.at(0) + 512, BLOCK, 0, print)
    with pytest.raises(AssertionError):
        Transfer(pages.at(0), 0, 0, print)


def test_the_choice_is_logged_and_leaves_no_file(tmp_path, caplog):
    caplog.set_level("INFO")
    assert {choose_io(tmp_path, io) for io in IO_CHOICES if io != "io_uring"} <= set(IO_CHOICES)
    assert choose_io(tmp_path, "threads") == "threads"
    assert f"storage I/O in {tmp_path}: threads" in caplog.text
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="io='aio'"):
        choose_io(tmp_path, "aio")


def test_a_kernel_without_io_uring(tmp_path, monkeypatch, caplog):
    """Where the kernel forbids io_uring, for example by seccomp, threads are used unless it is
    forced."""
    caplog.set_level("INFO")

    class Forbidden:
        @staticmethod
        def IoRing(*_):
            raise PermissionError(errno.EPERM, "io_uring_setup: not permitted")

    monkeypatch.setattr(native_library, "_native", Forbidden)
    assert choose_io(tmp_path, "auto") == "threads"
    assert "io_uring refused" in caplog.text
    for forced in ("io_uring", "sqpoll"):
        with pytest.raises(PermissionError):
            choose_io(tmp_path, forced)
    monkeypatch.setattr(native_library, "_native", None)
    assert choose_io(tmp_path, "auto") == "threads"


def test_wrong_data_in_the_trial_is_a_refusal(tmp_path, monkeypatch):
    real = open_block_file

    def lying(fd, *, is_direct, depth, io):
        file = real(fd, is_direct=is_direct, depth=depth, io="threads")
        if io == "io_uring":
            file.write = lambda transfers: [t.done(None) for t in transfers]
            os.ftruncate(fd, 2 * ALIGNMENT)
        return file

    monkeypatch.setattr(direct_io, "open_block_file", lying)
    assert choose_io(tmp_path, "auto") == "threads"


def test_no_o_direct(tmp_path, monkeypatch, caplog, pages):
    caplog.set_level("INFO")
    real = os.open

    def refusing(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    fd, is_direct = open_direct(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert not is_direct and "through the page cache" in caplog.text
    file = open_block_file(fd, is_direct=False)
    pages.fill(0, b"buffered")
    wait_for(file.write, [(pages.at(0), BLOCK, 0)])
    wait_for(file.read, [(pages.at(1), BLOCK, 0)])
    file.close()
    assert pages.holds(1, b"buffered")


@pytest.mark.parametrize("kind", ["best", "portable"])
def test_checksum_is_xxh3(kind):
    """Known answers come from the reference implementation (xxhash 3.x, xxh3_64)."""
    library = native_library.library()
    before = library.instruction_set()
    if kind == "portable":
        library.choose_instruction_set("portable")
    try:
        data = (ctypes.c_char * 65536).from_buffer_copy(bytes(range(256)) * 256)
        address = ctypes.addressof(data)
        assert library.checksum(address, 4096) == 0xEB4B7C3707879151
        assert library.checksum(address, 241) == 0x2E8CD95421C6D02
        assert library.checksum(address, 65536) == 0x9A1DB56D610A5516
        data[4097] = b"!"
        assert library.checksum(address, 65536) != 0x9A1DB56D610A5516
        with pytest.raises(ValueError, match="more than 240"):
            library.checksum(address, 240)
    finally:
        library.choose_instruction_set(before)


def test_files_of_a_folder_that_cannot_be_written_to_are_read_by_threads(tmp_path, monkeypatch):
    assert choose_read_io(tmp_path) == choose_io(tmp_path)
    refusal = PermissionError(errno.EACCES, "not writable")
    monkeypatch.setattr(direct_io, "_try_out", lambda *given: refusal)
    assert choose_read_io(tmp_path) == "threads"
