"""A borrower's lease on a replica that lends memory, and its turns to compute.

A lease computes in a thread of its own, as a guest of the lender's process (ops/csrc/team.h). All
threads have the same priority: one of a lower priority that holds the interpreter or a lock would
keep the lender waiting. Instead, a guest gives way between the tasks of a kernel.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from memory.nodes.server.connection import Connection
from ops.cpu import native_library
from transport.base import TransportError

_LOOK_S = 0.01  # from one look whether the lease has ended to the next


class LeaseEndedError(TransportError):
    """The lender has ended the lease; what its thread was computing is void."""


class Turn:
    """A context in which a lease computes, one lease at a time. Raises LeaseEndedError when the
    lease has ended before or meanwhile."""

    def __init__(self, computing: threading.Lock, host: Any) -> None:
        """host: the lender's process, as the library's Host."""
        self.guest: Any = native_library.library().Guest(host)
        self._computing = computing

    def __enter__(self) -> None:
        while self.guest.admit():
            if self._computing.acquire(timeout=_LOOK_S):
                return
        raise LeaseEndedError("the lease was called back")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._computing.release()
        if kind is None and self.guest.has_ended:
            raise LeaseEndedError("the lease was called back")


@dataclass(slots=True, eq=False)
class Lease(Connection):
    """A borrower's connection. handling: held by the lease's thread while it handles a message, and
    by a thread that frees the lease's memory."""

    turn: Turn = field(kw_only=True)
    handling: threading.Lock = field(default_factory=threading.Lock, kw_only=True)
