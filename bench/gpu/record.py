"""The results of one section of the GPU report, which are on disk after every case."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The exit code of a section's process whose device can no longer be used. A new process goes on
# with the next case.
LOST_DEVICE = 75
_TRACE_LINES = 12
_DEVICE_FAULTS = (
    "CUDA error",
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
)

Figures = dict[str, Any]


def is_device_fault(error: Exception) -> bool:
    """Returns whether the process can no longer use its device. A library that refuses a shape has
    a similar message, but the next call works."""
    if not any(fault in str(error) for fault in _DEVICE_FAULTS):
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").cpu()
    except Exception:
        return True
    return False


class Record:
    """The cases and errors of a section by name. It continues a file that exists.

    limit_s: seconds that this process may take. is_dry: tiny shapes on any device.
    """

    def __init__(self, path: Path, *, limit_s: float = 3600.0, is_dry: bool = False) -> None:
        self.path = path
        self.is_dry = is_dry
        self._ends_s = time.monotonic() + limit_s
        found = json.loads(path.read_text()) if path.is_file() else {}
        self.cases: dict[str, Figures] = found.get("cases", {})
        self.errors: dict[str, str] = found.get("errors", {})

    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def put(self, name: str, /, **figures: Any) -> None:
        self.cases.setdefault(name, {}).update(figures)
        self._write()

    def fail(self, name: str, text: str) -> None:
        self.errors[name] = text
        self._write()

    def run(self, name: str, work: Callable[[], Figures]) -> Figures | None:
        """Runs a case that the file does not have, and returns its figures, or None if it has
        failed, now or in an earlier process. Ends the process if its device is lost."""
        if name in self.cases or name in self.errors:
            return self.cases.get(name)
        try:
            self.put(name, **work())
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).splitlines()
            self.fail(name, "\n".join(trace[-_TRACE_LINES:]))
            if is_device_fault(error):
                print(f"{name}: the device is lost: {error}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(LOST_DEVICE)  # nothing on the device can be released any more
            gc.collect()  # the frames of the failed case held memory
        return self.cases.get(name)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"cases": self.cases, "errors": self.errors}))
        part.replace(self.path)
