"""How urgent the threads of the exchange are."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 10
_LEAST_URGENT = 19


def give_way() -> None:
    """Makes the calling thread less urgent than the others of its process, as Linux can."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(own + _NICENESS, _LEAST_URGENT))
