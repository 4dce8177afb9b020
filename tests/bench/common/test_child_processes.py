"""The memory of child processes."""

from __future__ import annotations

import os
import signal
import subprocess

from bench.common.child_processes import children_bytes


def test_children_and_theirs_count() -> None:
    inner = "sleep 60 & echo $$; wait"
    outer = subprocess.Popen(
        ["sh", "-c", f"sh -c '{inner}' & wait"],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert outer.stdout is not None
    try:
        child = int(outer.stdout.readline())
        assert children_bytes(outer.pid) > children_bytes(child) > 0
    finally:
        os.killpg(outer.pid, signal.SIGKILL)
        outer.wait()
        outer.stdout.close()
    assert children_bytes(outer.pid) == 0
