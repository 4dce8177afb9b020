"""Uses the memory of a replica on this machine instead of a copy of it.

The peer hands over the descriptor of its weights with the connection (shm). The new replica maps
them, compares every chunk as if it had been sent, and needs the peer no more: the memory lives as
long as one of both does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ops.cpu import native_library
from serve.machine import usable_processors
from serve.models.packed_cache.layout import DamagedCache, Index, Span, chunks_of
from serve.models.packed_cache.shared_memory import (
    NotShared,
    SharedMemory,
    is_on_huge_pages,
    map_shared,
)

_POLL_S = 0.05


def use_shared(fd: int, index: Index, poll: Callable[[], object]) -> SharedMemory:
    """Returns the memory of a peer's descriptor, in which every checksum is right. poll: is called
    meanwhile, and may raise. NotShared, DamagedCache."""
    shared = map_shared(fd, index.data_end)
    checksum, base = native_library.library().checksum, shared.data.data_ptr()

    def check(chunk: Span, wanted: int) -> None:
        if checksum(base + chunk.start, chunk.num_bytes) != wanted:
            raise DamagedCache(f"its bytes from {chunk.start} on have another checksum")

    with ThreadPoolExecutor(usable_processors(), "mergestep-check-weights") as threads:
        chunks = zip(chunks_of(index.data_end), index.checksums, strict=True)
        left = {threads.submit(check, chunk, wanted) for chunk, wanted in chunks}
        try:
            while left:
                done, left = wait(left, _POLL_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                poll()
        finally:
            threads.shutdown(cancel_futures=True)
    if not is_on_huge_pages(shared.data, index.data_end):
        raise NotShared("the system has few huge pages of it")
    return shared
