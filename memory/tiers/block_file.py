"""Files of aligned blocks, read and written asynchronously.

`BlockFile` is the protocol; `RingFile` (io_uring) and `ThreadFile` (pread in threads) implement
it. Short transfers are continued and interrupted ones repeated; any other failure is an OSError
with its errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ops.cpu import native_library

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
MAX_TRANSFER_BYTES = 1 << 30
MAX_THREADS = 16
_MAX_TRIES = 100  # attempts of one transfer without progress
_REAP_S = 1.0
_END_S = 0.1  # for threads without work to end
_FALLOC_KEEP_SIZE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

Done = Callable[[OSError | None], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block: memory address, length and file offset in bytes, all multiples of 4096.

    done(error) is called once, in a thread of the file. It must be quick and must not raise. The
    memory belongs to the transfer until then.
    """

    address: int
    length: int
    offset: int
    done: Done

    def __post_init__(self) -> None:
        assert 0 < self.length <= MAX_TRANSFER_BYTES, f"{self.length=}"
        fields = (self.address, self.length, self.offset)
        assert all(field % ALIGNMENT == 0 for field in fields), f"{fields=}"


class BlockFile(Protocol):
    """A file of blocks. `io` names the I/O method. Any thread may call any method."""

    io: str
    is_direct: bool

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Starts the transfers; those beyond the queue's depth wait here in their order."""

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Starts writes, as `read` starts reads. A write beyond the end extends the file."""

    def register(self, regions: Sequence[tuple[int, int]]) -> bool:
        """Pins (address, size) regions so that their transfers are cheaper. Returns False if that
        is not possible. What is mapped at an address must stay there while it is registered."""

    def fileno(self) -> int: ...

    def preallocate(self, size_bytes: int) -> None:
        """Lets the file system allocate so many bytes. Raises OSError if it cannot."""

    def flush(self) -> None:
        """Waits until finished writes are on the medium. Raises OSError."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Closes the file after all transfers; later ones end with EBADF. With a time limit,
        transfers that have not begun by then end with ECANCELED. Returns False if some are still
        running, in which case the file stays open."""


class _Operation:
    """A transfer in progress. finished: bytes done. tries: attempts without progress."""

    __slots__ = ("finished", "is_write", "transfer", "tries")

    def __init__(self, transfer: Transfer, *, is_write: bool) -> None:
        self.transfer = transfer
        self.is_write = is_write
        self.finished = 0
        self.tries = 0

    @property
    def left(self) -> int:
        return self.transfer.length - self.finished

    def advance(self, result: int, *, is_direct: bool) -> OSError | None:
        """Counts `result` bytes, or -errno. Returns the error that ends the transfer, if any; it is
        also over when nothing is left."""
        if result < 0:
            is_transient = -result in (errno.EINTR, errno.EAGAIN)
            return self._retry() if is_transient else os_error(-result)
        if result == 0:
            if self.is_write:
                return self._retry()
            return OSError(errno.EIO, "the file ends inside the block")
        # The rest must be aligned again, so part of a short transfer may be done twice.
        gained = result
        if result < self.left and is_direct:
            gained = result // ALIGNMENT * ALIGNMENT
        if gained == 0:
            return self._retry()
        self.finished += gained
        self.tries = 0
        return None

    def _retry(self) -> OSError | None:
        self.tries += 1
        return os_error(errno.EIO) if self.tries > _MAX_TRIES else None

    def deliver(self, error: OSError | None) -> None:
        try:
            self.transfer.done(error)
        except Exception:  # a bug in the callback must not stop other transfers
            logger.exception("the callback of a transfer failed")


def preallocate(fd: int, size_bytes: int) -> None:
    """Lets the file system allocate so many bytes of a file. Raises OSError if it cannot."""
    while _libc.fallocate(fd, _FALLOC_KEEP_SIZE, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise os_error(number)


class _File:
    """The descriptor and the blocking calls of both implementations."""

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self.is_direct = is_direct
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def preallocate(self, size_bytes: int) -> None:
        preallocate(self._fd, size_bytes)

    def flush(self) -> None:
        os.fdatasync(self._fd)


class RingFile(_File):
    """A file on io_uring. The caller's thread submits; one thread reaps completions and runs
    callbacks."""

    def __init__(
        self, fd: int, *, is_direct: bool, depth: int, io: str = "io_uring", ring: Any = None
    ) -> None:
        """Owns the descriptor from now on. Raises OSError if the kernel refuses a ring.

        ring: an object with the methods of the native IoRing; by default a new one.
        """
        super().__init__(fd, is_direct=is_direct)
        self.io = io
        if ring is None:
            if not native_library.is_available():
                raise OSError(errno.ENOSYS, "the native library is not built")
            ring = native_library.library().IoRing(fd, depth, io == "sqpoll", io == "iopoll")
        self._ring = ring
        self._depth = depth
        self._change = threading.Condition()
        self._waiting: deque[_Operation] = deque()
        self._failed: list[tuple[_Operation, OSError | None]] = []
        self._in_progress: dict[int, _Operation] = {}
        self._next_tag = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._reap, name="mergestep-io", daemon=True)
        self._thread.start()

    def read(self, transfers: Sequence[Transfer]) -> None:
        self._start([_Operation(transfer, is_write=False) for transfer in transfers])

    def write(self, transfers: Sequence[Transfer]) -> None:
        self._start([_Operation(transfer, is_write=True) for transfer in transfers])

    def register(self, regions: Sequence[tuple[int, int]]) -> bool:
        try:
            self._ring.register_buffers(list(regions))
        except OSError as error:
            logger.info("storage I/O: memory is not registered (%s)", error)
            return False
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        with self._change:
            if self._is_closed:
                return not self._thread.is_alive()
            self._is_closed = True
            self._change.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._change:
                waiting, self._waiting = self._waiting, deque()
            _cancel(waiting)
            self._thread.join(_END_S)
        if self._thread.is_alive():
            return False
        self._ring = None  # before the descriptor: the ring's own reference goes with it
        os.close(self._fd)
        return True

    def _start(self, operations: list[_Operation]) -> None:
        with self._change:
            if not self._is_closed:
                self._waiting.extend(operations)
                self._submit()
                self._change.notify_all()
                return
        for operation in operations:
            operation.deliver(os_error(errno.EBADF))

    def _submit(self) -> None:
        """Submits waiting operations as far as the queue has room. The caller holds the lock."""
        batch: list[_Operation] = []
        fields: list[int] = []
        room = self._depth - len(self._in_progress)
        while self._waiting and len(batch) < room:
            operation = self._waiting.popleft()
            transfer, finished = operation.transfer, operation.finished
            tag = self._next_tag = (self._next_tag + 1) % (1 << 62)
            fields += (tag, operation.is_write, transfer.address + finished)
            fields += (operation.left, transfer.offset + finished)
            self._in_progress[tag] = operation
            batch.append(operation)
        if not batch:
            return
        tags = fields[::5]
        try:
            taken = self._ring.submit(fields)
        except OSError as error:
            self._failed += [(operation, error) for operation in batch]
            batch, taken = [], 0
        for tag in tags[taken:]:
            del self._in_progress[tag]
        self._waiting.extendleft(reversed(batch[taken:]))

    def _reap(self) -> None:
        while True:
            with self._change:
                while not (self._in_progress or self._waiting or self._failed):
                    if self._is_closed:
                        return
                    self._change.wait()
                has_some = bool(self._in_progress)
            events = self._wait_for_events() if has_some else []
            with self._change:
                finished, self._failed = self._failed, []
                for tag, result in events:
                    operation = self._in_progress.pop(tag)
                    error = operation.advance(result, is_direct=self.is_direct)
                    if error is not None or operation.left == 0:
                        finished.append((operation, error))
                    else:
                        self._waiting.appendleft(operation)
                self._submit()
            for operation, error in finished:
                operation.deliver(error)

    def _wait_for_events(self) -> list[tuple[int, int]]:
        try:
            events: list[tuple[int, int]] = self._ring.reap(1, _REAP_S)
        except OSError:  # transfers may still run, so none can be ended
            logger.exception("waiting for the kernel failed; trying again")
            time.sleep(0.1)
            return []
        return events


# (descriptor, one buffer, offset) -> bytes; preadv and pwritev, or a test's double.
Call = Callable[[int, Sequence[Any], int], int]


class ThreadFile(_File):
    """Blocking reads and writes in a few threads. It works on every system."""

    io = "threads"

    def __init__(
        self,
        fd: int,
        *,
        is_direct: bool,
        depth: int,
        pread: Call = os.preadv,
        pwrite: Call = os.pwritev,
    ) -> None:
        """Owns the descriptor from now on."""
        super().__init__(fd, is_direct=is_direct)
        self._calls = (pread, pwrite)
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"mergestep-io-{i}", daemon=True)
            for i in range(min(depth, MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def read(self, transfers: Sequence[Transfer]) -> None:
        self._start([_Operation(transfer, is_write=False) for transfer in transfers])

    def write(self, transfers: Sequence[Transfer]) -> None:
        self._start([_Operation(transfer, is_write=True) for transfer in transfers])

    def register(self, regions: Sequence[tuple[int, int]]) -> bool:
        return False

    def close(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if self._is_closed:
                return not any(thread.is_alive() for thread in self._threads)
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)
        if not self._join(timeout_s):
            waiting = []
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            for _ in self._threads:
                self._queue.put(None)
            _cancel([operation for operation in waiting if operation is not None])
            if not self._join(_END_S):
                return False
        os.close(self._fd)
        return True

    def _join(self, timeout_s: float | None) -> bool:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, operations: list[_Operation]) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                for operation in operations:
                    self._queue.put(operation)
        if is_closed:
            for operation in operations:
                operation.deliver(os_error(errno.EBADF))

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation.deliver(self._run(operation))

    def _run(self, operation: _Operation) -> OSError | None:
        transfer, call = operation.transfer, self._calls[operation.is_write]
        error: OSError | None = None
        while operation.left > 0 and error is None:
            start = transfer.address + operation.finished
            buffer = (ctypes.c_char * operation.left).from_address(start)
            try:
                result = call(self._fd, [buffer], transfer.offset + operation.finished)
            except OSError as raised:
                result = -(raised.errno or errno.EIO)
            error = operation.advance(result, is_direct=self.is_direct)
        return error


def _cancel(operations: Iterable[_Operation]) -> None:
    for operation in operations:
        operation.deliver(os_error(errno.ECANCELED))


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
