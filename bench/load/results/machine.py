"""Describes the client's machine, the versions of packages, and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mergestep", "numpy", "torch", "aiohttp", "uvloop", "matplotlib")
ROOT = Path(__file__).parents[3]


def machine() -> dict[str, Any]:
    """Returns cpu, cores, memory_gib, os, python, packages and commit; unknown values are None."""
    return {
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": _commit(),
    }


def _line(path: str, name: str) -> str | None:
    """Returns the first value of a name in a file of `name : value`, or None."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _memory_gib() -> float | None:
    total = _line("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """Returns the checkout's commit, with + if files differ from it, or None without a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=5, check=True
    )
    return done.stdout.strip()
