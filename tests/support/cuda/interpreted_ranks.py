"""Ranks on Triton's interpreter as threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces functions of Triton's language while it runs a kernel, so that only
    one thread may launch at a time."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    lock, original = threading.Lock(), interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            original(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
