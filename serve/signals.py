"""What SIGTERM and SIGINT do while a model loads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGTERM, signal.SIGINT)
_FIRST_PROCESS = 1


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT end the process at once, with the signal's status (in a shell, 128
    and its number). Call it in the main thread.

    Python runs its own handlers between two of its instructions, for which native code that loads a
    tokenizer or weights may keep it waiting. The system's default needs no Python, but is ignored
    in the first process of a container, which therefore has a handler here too.
    """
    action = _exit if os.getpid() == _FIRST_PROCESS else signal.SIG_DFL
    before = [(number, signal.signal(number, action)) for number in _STOPS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
