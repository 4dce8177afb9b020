"""Formats log records as text or JSON, each on one line whatever it contains."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# control characters, line separators, and characters that change the direction of text
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F))}


class TextFormatter(logging.Formatter):
    """Formats records as text; the lines of a traceback follow, indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + line.translate(_CONTROLS) for line in lines)


class JsonFormatter(logging.Formatter):
    """Formats records as JSON: time, level, logger, `fields` or else message, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_format(name: str) -> None:
    """Sets the format, "text" or "json", of the root logger's handlers."""
    formatter = JsonFormatter() if name == "json" else TextFormatter()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
