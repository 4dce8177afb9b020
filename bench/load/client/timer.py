"""A timer for the event loop that is exact to about 50 µs.

uvloop's own timers (libuv's) count milliseconds, which is too coarse for a thousand requests per
second, and a busy wait would take the core that a server on the same machine needs. The kernel's
timerfd takes absolute nanoseconds and is read like a socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0
_COARSE_S = 0.001


class _Spec(ctypes.Structure):
    """The C struct itimerspec. Its interval stays 0, so that the timer fires once."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Timer:
    """Calls back once after each set(), no earlier than its time (time.perf_counter). A later set()
    replaces an earlier one. The timer belongs to the running event loop; its owner closes it."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._spec = _Spec()
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._expired)

    def set(self, at_s: float) -> None:
        self._at_s = at_s
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            delay_s = max(0.0, at_s - time.perf_counter() - _COARSE_S)
            self._handle = self._loop.call_later(delay_s, self._spin)
            return
        spec = self._spec
        spec.at_s = int(at_s)
        spec.at_ns = max(1, int((at_s - spec.at_s) * 1e9))  # all zero would disarm it
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # the timer was set again since the event
            return
        self._callback()

    def _spin(self) -> None:
        """Waits for the last millisecond by yielding, on systems without timerfd."""
        if time.perf_counter() < self._at_s:
            self._handle = self._loop.call_later(0, self._spin)
        else:
            self._callback()


class Sleeper:
    """Lets one coroutine wait until a time of time.perf_counter."""

    def __init__(self) -> None:
        self._timer = Timer(self._wake)
        self._waiter: asyncio.Future[None] | None = None

    async def until(self, at_s: float) -> None:
        """Waits until at_s. If that time has passed, it returns without yielding."""
        if at_s <= time.perf_counter():
            return
        self._waiter = asyncio.get_running_loop().create_future()
        self._timer.set(at_s)
        await self._waiter

    def close(self) -> None:
        self._timer.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
