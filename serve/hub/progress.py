"""Shows how far a download is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque

from serve.units import format_memory

_BAR_CHARS = 30
_DRAW_S = 0.2
_LINE_S = 30.0
_RATE_S = 15.0


class DownloadProgress:
    """Counts the bytes of all files of a download. Any thread may report.

    The bar is plain text that leaves the cursor visible: a signal may end the process at any time.
    """

    def __init__(self, name: str, total: int, done: int, *, is_shown: bool = True) -> None:
        self._name = name
        self._total = total
        self._is_shown = is_shown
        is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_bar = is_shown and is_terminal
        self._lock = threading.Lock()
        self._by_file: dict[str, int] = {}
        now_s = time.monotonic()
        self._points: deque[tuple[float, int]] = deque([(now_s, done)])
        self._shown_s = now_s
        self._is_drawn = False

    def report(self, file: str, done: int) -> None:
        """Notes how many bytes of a file are there."""
        with self._lock:
            self._by_file[file] = done
            now_s = time.monotonic()
            if now_s - self._shown_s >= (_DRAW_S if self._is_bar else _LINE_S):
                self._shown_s = now_s
                self._show(now_s)

    def close(self) -> None:
        """Removes the bar."""
        with self._lock:
            if self._is_drawn:
                _write("\r\x1b[K")
            self._is_drawn = self._is_shown = self._is_bar = False

    def _show(self, now_s: float) -> None:
        done = sum(self._by_file.values())
        while len(self._points) > 1 and now_s - self._points[0][0] > _RATE_S:
            self._points.popleft()
        since_s, before = self._points[0]
        self._points.append((now_s, done))
        rate = max(0, done - before) / max(now_s - since_s, 1e-3)
        text = progress_text(self._name, done, self._total, rate)
        if self._is_bar:
            filled = _BAR_CHARS * done // max(self._total, 1)
            bar = "#" * filled + "." * (_BAR_CHARS - filled)
            line = f"[{bar}] {text}"
            width = _width()
            self._is_drawn = True
            _write("\r\x1b[K" + (line if len(line) <= width else text[:width]))
        elif self._is_shown:
            _write(f"{text}\n")


def progress_text(name: str, done: int, total: int, rate: float) -> str:
    """Formats what is there, the rate and the time left. Sizes are bytes, the rate bytes/s."""
    text = f"{name}: {format_memory(done)} of {format_memory(total)}"
    if rate < 1:
        return text
    left = _duration(max(0, total - done) / rate)
    return f"{text}, {format_memory(round(rate))}/s, {left} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _width() -> int:
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError):
        return 79


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
