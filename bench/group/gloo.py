"""An exchange by gloo's all-gather in place of the shared arena, as a contrast.

`use_gloo` prepares an engine's process, and `python -m bench.group.gloo` is the process of its
workers. The ranks meet at the file that STORE names. A rank that is lost is not noticed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from serve.group import sizes, worker_main
from serve.group.exchange.cuda import CudaExchange
from serve.group.launch import LocalWorkers
from transport.arena import Arena

STORE = "MERGESTEP_BENCH_GLOO"


class GlooExchange:
    """Stands in for ArenaExchange, and takes of its arena only the ranks."""

    def __init__(
        self, arena: Arena, max_rows: int, max_row_bytes: int, deadline_s: float = 10.0
    ) -> None:
        self.rank, self.size = arena.rank, arena.num_ranks
        self._arena = arena
        store = f"file://{os.environ[STORE]}"
        dist.init_process_group(
            "gloo", init_method=store, rank=arena.rank, world_size=arena.num_ranks
        )
        assert dist.group.WORLD is not None
        cpu = torch.device("cpu")
        self._inner = CudaExchange(dist.group.WORLD, cpu, max_rows, max_row_bytes)

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._inner.begin(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        self._inner.complete(buffer, bounds)

    def prepare(self) -> None:
        """It is ready."""

    def settle(self) -> None:
        """The host waits in `complete`."""

    @property
    def waited_s(self) -> float:
        """With the copies, which the arena does not have."""
        return self._inner.waited_s

    @property
    def num_completed(self) -> int:
        return self._inner.num_completed

    def abort(self) -> None:
        self._arena.abort()

    def abort_group(self) -> None:
        self._arena.abort()

    def join(self, generation: int) -> None:
        self._arena.join(generation)

    def close(self) -> None:
        dist.destroy_process_group()
        self._arena.close()


def use_gloo(store: str) -> None:
    """Makes the engines of this process, and their workers, exchange by gloo."""
    os.environ[STORE] = store
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _replace()

    def spawn(self: LocalWorkers) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bench.group.gloo"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    patch.object(LocalWorkers, "_spawn", spawn).start()


def _replace() -> None:
    patch.object(sizes, "ArenaExchange", GlooExchange).start()


if __name__ == "__main__":
    _replace()
    worker_main.main()
