"""Parses server-sent events (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

MAX_EVENT = 1 << 20  # bytes of one event, complete or not
_BOM = b"\xef\xbb\xbf"


class EventTooLongError(ValueError):
    """An event has more than MAX_EVENT bytes; the stream cannot be read further."""


class EventStream:
    """Turns bytes into the data of events. Lines end with LF, CR LF or CR. Comments and fields
    other than data are ignored, except `error:`, which some servers (llama.cpp) send: it becomes
    data in OpenAI's shape."""

    __slots__ = ("_lines", "_num_bytes", "_rest", "_started")

    def __init__(self) -> None:
        self._rest = bytearray()  # the line that has not ended
        self._lines: list[bytes] = []
        self._num_bytes = 0  # held in self._lines
        self._started = False

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that is now complete. Raises EventTooLongError."""
        is_inside = self._started and self._rest and not self._rest.endswith(b"\r")
        if is_inside and b"\n" not in data and b"\r" not in data:
            self._hold(data)  # the bytes of a long line are not searched again
            return []
        text = bytes(self._rest) + data if self._rest else data
        if not self._started and len(text) >= len(_BOM):
            text = text.removeprefix(_BOM)
            self._started = True
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # its LF may follow
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest.clear()
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._lines:
                events.append(self._event())
        if rest or held:
            self._hold(rest + held)
        return events

    def finish(self) -> list[bytes]:
        """Returns the last event, if the body ended without an empty line after it."""
        line = bytes(self._rest).removesuffix(b"\r")
        self._rest.clear()
        if line:
            self._take(line)
        return [self._event()] if self._lines else []

    def _hold(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) + self._num_bytes > MAX_EVENT:
            raise EventTooLongError

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"error:"):
            self._lines.append(b'{"error":' + line[6:] + b"}")
        else:
            return
        self._num_bytes += len(line) + 1
        if self._num_bytes > MAX_EVENT:
            raise EventTooLongError

    def _event(self) -> bytes:
        data = self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines)
        self._lines, self._num_bytes = [], 0
        return data
