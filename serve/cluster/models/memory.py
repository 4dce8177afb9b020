"""The memory that a child process takes, and an estimate before its first start."""

from __future__ import annotations

import re
from pathlib import Path

# of a process that has loaded no model yet: the interpreter, torch, and its threads
PROCESS_BYTES = 320 << 20
_KV_LINE = re.compile(r"^mergestep:(kv_pages|kv_page_bytes)\{([^}]*)\} (\S+)$", re.MULTILINE)


def expected_bytes(file_bytes: int, dtype: str, kv_bytes: int) -> int:
    """Returns what a model takes at most before it has been measured. file_bytes: those of its
    weight files, which packing seldom enlarges, unless to 32 bits."""
    return PROCESS_BYTES + file_bytes * (2 if dtype == "float32" else 1) + kv_bytes


def family_bytes(pid: int) -> int:
    """Returns the memory of a process and of its children; what several share is divided by their
    number. 0 if it has ended."""
    return sum(_own_bytes(each) for each in _family(pid))


def _family(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        for file in _listed(Path(f"/proc/{each}/task")):
            waiting += map(int, _read(file / "children").split())
    return found


def _own_bytes(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def kv_bytes_of(metrics: str) -> tuple[int, int]:
    """Returns the bytes of K/V memory that a server may take and those that it has mapped, from its
    /metrics; zeros where it does not say."""
    values: dict[str, float] = {}
    for name, labels, number in _KV_LINE.findall(metrics):
        state = re.search(r'state="(\w+)"', labels)
        values[state[1] if state else name] = float(number)
    page = int(values.get("kv_page_bytes", 0))
    return int(values.get("total", 0)) * page, int(values.get("mapped", 0)) * page


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
