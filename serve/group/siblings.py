"""The connections between the tensor ranks of a stage that are on several hosts.

Each rank connects to the ranks after it, and accepts those before it. Connections belong to the
epoch in which a group is formed; those of an earlier one are closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from serve.group.exchange.windows import WindowExchange
from serve.group.grid import Grid
from serve.group.sizes import BARRIER_DEADLINE_S, largest_result, sibling_window_bytes
from serve.loading.model_source import ModelSource
from transport import connect, listen
from transport.base import Endpoint, TransportError, TransportTimeoutError

_ACCEPT_S = 20.0


class SiblingListener:
    """Accepts the tensor ranks before this one."""

    def __init__(self, url: str, key: bytes, window_bytes: int) -> None:
        self._listener = listen(url, key=key, window_bytes=window_bytes)
        self._early: Endpoint | None = None  # of an epoch that this rank has not begun
        self.url = self._listener.url

    def accept(self, epoch: int, ranks: Sequence[int]) -> dict[int, Endpoint]:
        """Waits for ranks of this epoch. Raises TransportError, which names those missing."""
        found: dict[int, Endpoint] = {}
        end_s = time.monotonic() + _ACCEPT_S
        try:
            while len(found) < len(ranks):
                endpoint = self._next(end_s - time.monotonic())
                if endpoint is None:
                    missing = sorted(set(ranks) - found.keys())
                    raise TransportTimeoutError(
                        f"tensor ranks {missing} did not connect within {_ACCEPT_S:.0f} s"
                    )
                info = endpoint.peer.info
                theirs, rank = info.get("epoch"), info.get("tensor")
                if isinstance(theirs, int) and theirs > epoch:
                    self._early = endpoint
                    raise TransportError(f"epoch {theirs} has begun, after {epoch}")
                if theirs != epoch or rank not in ranks or rank in found:
                    endpoint.close()
                    continue
                assert isinstance(rank, int)
                found[rank] = endpoint
        except BaseException:
            for endpoint in found.values():
                endpoint.close()
            raise
        return found

    def _next(self, timeout_s: float) -> Endpoint | None:
        if self._early is not None:
            endpoint, self._early = self._early, None
            return endpoint
        return self._listener.accept(timeout_s) if timeout_s > 0 else None

    def close(self) -> None:
        self._listener.close()
        if self._early is not None:
            self._early.close()


def connect_exchange(
    source: ModelSource,
    grid: Grid,
    tensor: int,
    urls: Sequence[str],
    listener: SiblingListener | None,
    key: bytes,
    epoch: int,
) -> WindowExchange:
    """Connects a tensor rank to the others of its stage; urls: where each listens, by tensor rank.
    The first rank has no listener. Raises TransportError."""
    if len(urls) != grid.tensor or (listener is None) != (tensor == 0):
        raise ValueError(f"tensor rank {tensor} of {grid.tensor} with {len(urls)} addresses")
    config, spec = source.config, source.spec
    window = sibling_window_bytes(spec, grid.tensor)
    info = {"epoch": epoch, "tensor": tensor}
    endpoints: dict[int, Endpoint] = {}
    try:
        for other in range(tensor + 1, grid.tensor):
            endpoints[other] = connect(urls[other], key=key, info=info, window_bytes=window)
        if listener is not None:
            endpoints |= listener.accept(epoch, range(tensor))
    except BaseException:
        for endpoint in endpoints.values():
            endpoint.close()
        raise
    largest = largest_result(config, spec)
    return WindowExchange(tensor, endpoints, 1, largest, BARRIER_DEADLINE_S)
