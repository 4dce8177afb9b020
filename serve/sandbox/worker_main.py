"""The child process of serve/sandbox/worker.py, started by path and never imported by the server.

It loads a script and answers calls with the function that its start(setup) returns, under limits
on memory and CPU time; the parent kills it at a deadline. Imports are minimal so that it starts
fast.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PAGE_BYTES = resource.getpagesize()


def limit_resources(memory_bytes: int) -> None:
    """Limits the address space to its present size plus memory_bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * PAGE_BYTES + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def end_first() -> None:
    """Lets the system end this process rather than the server when it has no memory left."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def allow_cpu(seconds: int) -> None:
    """Moves the CPU limit, which counts from the start of the process, for the next call."""
    limit = int(time.process_time()) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def load(script: str) -> Any:
    path = Path(script)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is Python"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    lines, answers = sys.stdin.buffer, sys.stdout.buffer

    def send(answer: object) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    end_first()
    module = load(sys.argv[1])
    setup = json.loads(lines.readline() or b"{}")
    if not setup:
        return
    allow_cpu(setup["cpu_s"] + 5)
    prepared = module.prepare(setup["job"])  # trusted data of any size
    limit_resources(setup["memory_bytes"])
    answer = module.start(prepared)
    send({})
    for line in lines:
        allow_cpu(setup["cpu_s"])
        send(answer(json.loads(line)))


if __name__ == "__main__":
    main()
