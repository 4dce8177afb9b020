"""How far a download is, as a bar or in lines."""

from __future__ import annotations

import io
import sys

import pytest

from serve.hub import progress
from serve.hub.progress import DownloadProgress, progress_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("done", "rate", "text"),
    [
        (0, 0.0, "m: 0 bytes of 2 GiB"),
        (1 << 30, float(1 << 20), "m: 1 GiB of 2 GiB, 1 MiB/s, 17 min 04 s left"),
        (2 << 30, float(1 << 20), "m: 2 GiB of 2 GiB, 1 MiB/s, 0 s left"),
        (1 << 30, 1e5, "m: 1 GiB of 2 GiB, 97.7 KiB/s, 2 h 58 min left"),
    ],
)
def test_text(done: int, rate: float, text: str) -> None:
    assert progress_text("m", done, 2 << 30, rate) == text


@pytest.mark.parametrize("columns", [30, 100])
def test_the_bar(monkeypatch: pytest.MonkeyPatch, clock: list[float], columns: int) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_width", lambda: columns)
    shown = DownloadProgress("m", 4000, 1000)
    shown.report("a", 1000)
    clock[0] += 1
    shown.report("b", 1000)
    text = "m: 1.95 KiB of 3.91 KiB, 1000 bytes/s, 2 s left"
    wide = f"[###############...............] {text}"
    assert out.getvalue() == "\r\x1b[K" + (wide if columns == 100 else text[:30])
    shown.close()
    assert out.getvalue().endswith("\r\x1b[K")
    clock[0] += 1
    shown.report("b", 2000)  # from a thread that has not ended yet
    assert out.getvalue().endswith("\r\x1b[K")


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    shown = DownloadProgress("m", 4000, 0)
    for _ in range(61):
        clock[0] += 1
        shown.report("a", 2000)
    assert out.getvalue().count("\n") == 2
    assert out.getvalue().startswith("m: 1.95 KiB of 3.91 KiB, ")
    hidden = DownloadProgress("m", 4000, 0, is_shown=False)
    clock[0] += 100
    hidden.report("a", 1)
    assert out.getvalue().count("\n") == 2
