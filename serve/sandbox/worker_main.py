"""The child of serve/sandbox/worker.py; started by path, never imported by the server.

Loads one script and answers questions with what its start(setup) returns, under limits
of memory and CPU time; the parent kills it on a deadline. Imports are minimal on purpose: it must
start fast.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PAGE_BYTES = resource.getpagesize()


def limit_resources(memory_bytes: int) -> None:
    """memory_bytes: beside the address space that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * PAGE_BYTES + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def allow_cpu(seconds: int) -> None:
    """The limit counts from the start of the process, so each question moves it."""
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

    def say(answer: object) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    module = load(sys.argv[1])
    setup = json.loads(lines.readline() or b"{}")
    if not setup:
        return
    allow_cpu(setup["cpu_s"] + 5)
    prepared = module.prepare(setup["job"])  # the server's own, of any size
    limit_resources(setup["memory_bytes"])
    answer = module.start(prepared)
    say({})
    for line in lines:
        allow_cpu(setup["cpu_s"])
        say(answer(json.loads(line)))


if __name__ == "__main__":
    main()
