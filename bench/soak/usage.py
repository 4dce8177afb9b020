"""Reads what a server process uses: from /proc, with its child processes, and from its /metrics."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.common.child_processes import children_bytes

_FIELDS = {"VmRSS": "rss", "RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
_LINE = re.compile(rf"^({'|'.join(_FIELDS)}):\s+(\d+) kB", re.M)
KEPT = "mergestep:kept_bytes"
PREFIX = "mergestep:"
WORKER = "worker_memory_bytes "


@dataclass(frozen=True, slots=True)
class Usage:
    """One sample. memory: bytes of the server process by part; "workers" are its child processes'.
    kept: bytes by what keeps them. metrics: the other gauges, by name and label."""

    at_s: float
    memory: dict[str, int]
    files: int
    threads: int
    kept: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def own_bytes(self) -> int:
        """The resident memory of the server without the K/V pool, which is shared memory of a
        fixed size, and without its workers, which come and go."""
        return self.memory["rss"] - self.memory["shared"]

    @property
    def own_files(self) -> int:
        """The open files of the server without its two pipes to each worker, which starts with the
        first call that needs it and may end when there was none for a while."""
        return self.files - 2 * sum(
            bool(size) for name, size in self.metrics.items() if name.startswith(WORKER)
        )


def read_usage(pid: int, at_s: float, metrics: str = "") -> Usage:
    """Reads the figures of a process. metrics: the text of /metrics."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = {_FIELDS[name]: int(size) << 10 for name, size in _LINE.findall(status)}
    memory["workers"] = children_bytes(pid)
    kept, others = _read_metrics(metrics)
    return Usage(
        at_s,
        memory,
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        kept,
        others,
    )


def _read_metrics(text: str) -> tuple[dict[str, float], dict[str, float]]:
    kept: dict[str, float] = {}
    others: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "gauge" or not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            if family.name == KEPT:
                kept[labels[0]] = sample.value
            else:
                others[" ".join([family.name.removeprefix(PREFIX), *labels])] = sample.value
    return kept, others
