"""Groups of exchanges whose ranks are threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist

import transport
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.cuda import CudaExchange
from serve.group.exchange.slots import ring_bytes
from serve.group.exchange.windows import WindowExchange
from tests.support.transport.transport_rig import KEY, PATIENCE_S
from transport.arena import Arena
from transport.base import Endpoint

ROWS, ROW_BYTES = 40, 4096
WINDOW_BYTES = 64 << 10  # a message of 8 KiB: most results take several


def endpoints_of(url: str, size: int) -> list[dict[int, Endpoint]]:
    """Connects every rank to every other one."""
    found: list[dict[int, Endpoint]] = [{} for _ in range(size)]
    with closing(transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)) as listener:
        for one in range(size):
            for other in range(one):
                there = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
                here = listener.accept(PATIENCE_S)
                assert here is not None
                found[one][other], found[other][one] = here, there
    return found


def arena_group(size: int, deadline_s: float) -> list[ArenaExchange]:
    arena = Arena.create(ring_bytes(ROWS, ROW_BYTES), size, rank=0)
    arenas = [arena, *(Arena.open(arena.fd, rank) for rank in range(1, size))]
    return [ArenaExchange(arena, ROWS, ROW_BYTES, deadline_s) for arena in arenas]


def window_group(url: str, size: int, deadline_s: float) -> list[WindowExchange]:
    endpoints = endpoints_of(url, size)
    return [WindowExchange(r, endpoints[r], ROWS, ROW_BYTES, deadline_s) for r in range(size)]


def gloo_group(size: int) -> list[CudaExchange]:
    store = dist.HashStore()

    def make(rank: int) -> CudaExchange:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=PATIENCE_S)
        )
        group = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return CudaExchange(group, torch.device("cpu"), ROWS, ROW_BYTES)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))
