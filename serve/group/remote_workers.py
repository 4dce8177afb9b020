"""Accepts workers that others have started, and the ones that take the places of lost ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from serve.errors import ConfigError, MergestepError
from serve.group.links.worker_link import WorkerLink
from serve.group.membership import Membership
from transport import listen
from transport.base import Endpoint, Listener, TransportError

logger = logging.getLogger(__name__)

CONNECT_S = 600.0
"""How long ranks wait for one another: other hosts may have to be started first."""
_LOG_EVERY_S = 10.0
_WINDOW_BYTES = 1 << 20  # for the small messages of a worker


class RemoteWorkers:
    """Waits for workers at the group's address, as LocalWorkers starts them."""

    def __init__(self, member: Membership, key: bytes) -> None:
        """ConfigError if the address cannot be listened at."""
        self.key = key
        self._size = member.size
        self._urls: dict[int, str] = {}
        url = member.engine_url
        try:
            self._listener: Listener = listen(
                url, key=key, window_bytes=_WINDOW_BYTES, max_peers=4 * member.size + 16
            )
        except (TransportError, OSError, ValueError) as error:
            raise ConfigError(f"group_url: listening at {url} failed: {error}") from error

    def start(self, ranks: Iterable[int], check: Callable[[], object] = object) -> list[WorkerLink]:
        """Waits for workers and returns their connections. check: called while waiting; may raise.
        MergestepError names the ranks that did not connect."""
        missing = set(ranks)
        found: dict[int, WorkerLink] = {}
        began_s = logged_s = time.monotonic()
        try:
            while missing:
                check()
                endpoint = self._listener.accept(0.1)
                if endpoint is not None:
                    self._take(endpoint, missing, found)
                for rank in [rank for rank, link in found.items() if link.is_lost]:
                    found.pop(rank).close()
                    missing.add(rank)
                now_s = time.monotonic()
                names = ", ".join(map(str, sorted(missing)))
                if now_s > began_s + CONNECT_S:
                    raise MergestepError(f"ranks {names} did not connect within {CONNECT_S:.0f} s")
                if missing and now_s > logged_s + _LOG_EVERY_S:
                    logged_s = now_s
                    logger.info("waiting at %s for ranks %s", self._listener.url, names)
        except BaseException:
            for link in found.values():
                link.close()
            raise
        return [found[rank] for rank in sorted(found)]

    def _take(self, endpoint: Endpoint, missing: set[int], found: dict[int, WorkerLink]) -> None:
        """Takes a connection for its rank, unless that rank has one."""
        info = endpoint.peer.info
        rank, size, url = info.get("rank"), info.get("size"), info.get("listen")
        is_fit = isinstance(rank, int) and size == self._size and isinstance(url, str)
        if not is_fit or rank not in missing:
            logger.warning("%s is closed: it is rank %s of %s", endpoint.peer.address, rank, size)
            endpoint.close()
            return
        assert isinstance(rank, int) and isinstance(url, str)
        missing.discard(rank)
        self._urls[rank] = url
        found[rank] = WorkerLink(rank, endpoint, None)
        logger.info("rank %d is connected from %s", rank, endpoint.peer.address)

    def note_silence(self, silence_s: float) -> None:
        """Others start the processes."""

    def stage_url(self, rank: int) -> str:
        """Returns where a rank listens for other ranks, on a free port."""
        return self._urls[rank]

    def close(self) -> None:
        self._listener.close()
