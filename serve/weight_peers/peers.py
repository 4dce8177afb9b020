"""A replica's side of the exchange: what it pulls when it starts, and what it serves afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from serve.errors import ConfigError, ModelLoadError
from serve.machine import available_memory
from serve.models.checkpoint import Checkpoint
from serve.models.packed_cache.identity import shared_identity
from serve.models.packed_cache.in_memory import Found, PackedBytes
from serve.models.packed_cache.layout import (
    DATA_START,
    DamagedCache,
    Index,
    Span,
    read_index,
    shown,
)
from serve.models.packed_cache.shared_memory import NotShared
from serve.models.progress import LoadProgress
from serve.models.told_checkpoint import (
    Told,
    ToldCheckpoint,
    pack_table,
    read_table,
    tell,
    told_about,
)
from serve.units import format_memory
from serve.weight_peers.link import Description, WeightLink
from serve.weight_peers.pull import Pull, PullFailed
from serve.weight_peers.same_memory import use_shared
from serve.weight_peers.server import (
    MAX_PEERS,
    WINDOW_BYTES,
    OfferedWeights,
    WeightServer,
    WeightServerStats,
)
from serve.weight_peers.wire import PROTOCOL, Area, difference
from transport import listen
from transport.base import TransportError

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long a replica without weight files waits for a peer that has them."""
LEAST_RATE = 8 << 20
"""Bytes a second; each of MAX_PEERS then gets twice what a link asks for (link.LEAST_RATE)."""
_OF_ALL_RANKS = ("protocol", "config", "code", "instruction_set")
"""What a peer must have in common for its table of tensors to be of this model."""
_RETRY_S = 0.5
_LOG_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """urls: of peers. listen: where this replica serves. rate: the most bytes a second that it
    gives. fingerprint: returns that of the weight files, which are there if has_files.
    check_memory: raises ConfigError if there is none to load them from the files."""

    path: Path
    urls: tuple[str, ...]
    listen: str | None
    key: bytes
    rate: int | None
    has_files: bool
    fingerprint: Callable[[], str]
    check_memory: Callable[[], None]
    wait_s: float = WAIT_S


class Pulled(NamedTuple):
    """What a pull has brought. num_repeated: chunks that were asked for again. num_shared: bytes
    that are the peer's own memory."""

    num_bytes: int = 0
    seconds: float = 0.0
    num_repeated: int = 0
    num_shared: int = 0


class WeightPeers:
    """What packed weights come from, and go to, beside the files of this machine."""

    def __init__(self, settings: PeerSettings) -> None:
        """ConfigError if the rate is one for which no peer would wait."""
        if settings.rate is not None and settings.rate < LEAST_RATE:
            raise ConfigError(
                f"weights_rate_bytes {settings.rate} must be at least {LEAST_RATE}: up to "
                f"{MAX_PEERS} replicas share it, and leave a peer that sends too slowly"
            )
        self._settings = settings
        self._number = 0  # of this rank
        self._progress = LoadProgress()
        self._links: list[tuple[WeightLink, Description]] = []
        self._offered: tuple[dict[str, str], OfferedWeights] | None = None
        self._server: WeightServer | None = None
        self._refused: dict[str, str] = {}  # why peers do not tell, by their addresses
        self.pulled = Pulled()

    @property
    def url(self) -> str | None:
        """Where this replica serves."""
        return None if self._server is None else self._server.url

    def stats(self) -> WeightServerStats:
        return WeightServerStats() if self._server is None else self._server.snapshot()

    # ---- pulling

    def begin(self, number: int, progress: LoadProgress) -> None:
        """Begins to load a rank's weights. Where the directory has no weight files, it waits for a
        peer that tells about them. ModelLoadError if there is none."""
        self._number, self._progress = number, progress
        settings = self._settings
        tell(settings.path, None)
        if settings.has_files or not settings.urls:
            return
        end_s, log_s = time.monotonic() + settings.wait_s, time.monotonic() + _LOG_EVERY_S
        reasons = self._connect()
        while (refused := self._tell()) is not None:
            reasons = "; ".join(filter(None, [reasons, refused]))
            now_s = time.monotonic()
            if now_s > end_s:
                raise ModelLoadError(
                    f"{settings.path} has no weight files, and no peer of weights_from has given "
                    f"them for {settings.wait_s:.0f} s: {reasons}"
                )
            if now_s > log_s:
                log_s = now_s + _LOG_EVERY_S
                logger.info("weights_from: waiting for a peer: %s", reasons)
            progress.poll()
            time.sleep(_RETRY_S)
            reasons = self._connect()

    @property
    def wants_shared(self) -> bool:
        """Whether replicas on this machine may use the memory of this one's weights."""
        return (self._settings.listen or "").startswith("shm:")

    def pull(self, identity: Mapping[str, str]) -> Found | None:
        """Returns the packed weights of this identity from peers; None if they can be loaded from
        files instead. ModelLoadError or ConfigError if they cannot."""
        if not self._settings.urls:
            return None
        reasons = "" if self._links else self._connect()
        links, self._links = self._links, []
        try:
            return self._pulled(identity, links, reasons)
        except (PullFailed, DamagedCache, TransportError, OSError, MemoryError) as error:
            why = str(error) or type(error).__name__
            problem = f"weights_from: no weights from peers: {why}"
            if not self._settings.has_files:
                text = f"{self._settings.path} has no weight files, and {problem}"
                raise ModelLoadError(text) from error
            logger.warning("%s; they are loaded from files", problem)
            self._settings.check_memory()
            return None
        finally:
            for link, _ in links:
                link.close()

    def _pulled(
        self,
        identity: Mapping[str, str],
        links: list[tuple[WeightLink, Description]],
        reasons: str,
    ) -> Found:
        usable: list[tuple[WeightLink, Description]] = []
        for link, described in links:
            reason = self._difference(identity, link, described)
            if reason is None and usable and described.index_place != usable[0][1].index_place:
                reason = f"another index than that of {usable[0][0].url}"
            if reason is None:
                usable.append((link, described))
            else:
                reasons += f"{'; ' * bool(reasons)}{link.url}: {reason}"
                logger.warning("weights_from: %s is not used: %s", link.url, reason)
        if not usable:
            raise PullFailed(reasons)
        index = self._index_of(*usable[0])
        links_used = [link for link, _ in usable]
        return self._shared(index, links_used) or self._copied(index, links_used)

    def _shared(self, index: Index, links: list[WeightLink]) -> Found | None:
        """Returns the memory of a peer on this machine, if one shares it."""
        for link in links:
            began_s, fd = time.monotonic(), link.take_shared()
            if fd is None:
                continue
            try:
                shared = use_shared(fd, index, self._progress.poll)
            except (NotShared, DamagedCache) as error:
                logger.warning("weights_from: %s: its memory is not used: %s", link.url, error)
                continue
            seconds = time.monotonic() - began_s
            num_bytes = index.data_end - DATA_START
            self.pulled = Pulled(num_bytes, seconds, num_shared=num_bytes)
            logger.info(
                "packed weights: %s in the memory of %s, compared in %.2f s",
                *(format_memory(index.data_end), link.url, seconds),
            )
            return Found(index, shared.data[: index.data_end], shared)
        return None

    def _copied(self, index: Index, links: list[WeightLink]) -> Found:
        end, free_bytes = index.data_end, available_memory()
        if end > free_bytes:
            sizes = f"{format_memory(end)}, and {format_memory(free_bytes)} of memory are free"
            raise PullFailed(f"{links[0].url} has weights of {sizes}")
        began_s = last_s = time.monotonic()
        pull = Pull(index, self.wants_shared)

        def poll() -> None:
            nonlocal last_s
            self._progress.poll()
            self._progress.show_bytes(pull.done_bytes, pull.num_bytes)
            if time.monotonic() > last_s + _LOG_EVERY_S:
                last_s = time.monotonic()
                done, whole = format_memory(pull.done_bytes), format_memory(pull.num_bytes)
                logger.info("weights_from: %s of %s", done, whole)

        try:
            data = pull.run(links, poll)
        finally:
            self._progress.end_bytes()
        seconds = time.monotonic() - began_s
        self.pulled = Pulled(pull.num_bytes, seconds, pull.num_repeated)
        logger.info(
            "packed weights: %s from %s in %.2f s (%.2f GB/s, %d chunks repeated)",
            format_memory(pull.num_bytes),
            ", ".join(link.url for link in links),
            seconds,
            pull.num_bytes / 1e9 / seconds,
            pull.num_repeated,
        )
        return Found(index, data, pull.share())

    def _index_of(self, link: WeightLink, described: Description) -> Index:
        """Returns the index of a peer's weights."""
        poll = self._progress.poll
        try:
            content = link.fetch(Area.INDEX, described.index_place, poll)
        except TransportError as error:  # the peer may have left a connection that waited long
            logger.info("weights_from: %s: %s; once more", link.url, error)
            link.connect()
            content = link.fetch(Area.INDEX, described.index_place, poll)
        digest = bytes.fromhex(described.index_place[1])
        return read_index(content, digest, Span(described.data_end, len(content)))

    def _difference(
        self, identity: Mapping[str, str], link: WeightLink, described: Description
    ) -> str | None:
        """Returns why a peer's weights are not those that are needed, None if they are."""
        settings = self._settings
        wanted = {"protocol": PROTOCOL, **identity}
        reason = difference(wanted, link.info)
        if reason is not None:
            return reason
        if settings.has_files:
            return difference(
                {"checkpoint": settings.fingerprint()}, {"checkpoint": described.checkpoint}
            )
        known = told_about(settings.path)
        if known is not None and described.checkpoint != known.fingerprint:
            return "it has another checkpoint than the first peer"
        return None if described.is_complete else "the weight files are needed beside its weights"

    def _connect(self) -> str:
        """Connects to those peers that answer; returns why the others do not."""
        for link, _ in self._links:
            link.close()
        self._links, reasons = [], []
        for url in self._settings.urls:
            link = WeightLink(rank_url(url, self._number), self._settings.key)
            try:
                link.connect()
                self._links.append((link, link.describe(self._progress.poll)))
            except TransportError as error:
                link.close()
                reasons.append(_with_url(link.url, error))
                logger.info("weights_from: %s", reasons[-1])
            except BaseException:
                link.close()
                raise
        return "; ".join(reasons)

    def _tell(self) -> str | None:
        """Lets what a peer says stand for the weight files, and returns None; else why no peer has
        said it."""
        path, reasons = self._settings.path, []
        identity = {"protocol": PROTOCOL, **shared_identity(path, "", "")}
        wanted = {name: identity[name] for name in _OF_ALL_RANKS}
        for link, described in self._links:
            reason = difference(wanted, link.info)
            if reason is None and not (described.is_complete and described.table_place[0]):
                reason = "the weight files are needed beside its weights"
            if reason is None:
                try:
                    content = link.fetch(Area.TABLE, described.table_place, self._progress.poll)
                    tell(path, Told(described.checkpoint, read_table(path, content)))
                    return None
                except (TransportError, ValueError, MemoryError) as error:
                    reason = shown(str(error) or type(error).__name__)
            if self._refused.get(link.url) != reason:  # it is asked twice a second
                logger.warning("weights_from: %s is not used: %s", link.url, reason)
            self._refused[link.url] = reason
            reasons.append(f"{link.url}: {reason}")
        return "; ".join(reasons)

    # ---- serving

    def offer(
        self, identity: Mapping[str, str], checkpoint: Checkpoint, packed: PackedBytes
    ) -> None:
        """Notes what `listen` serves."""
        if self._settings.listen is None:
            return
        known = told_about(self._settings.path)
        fingerprint = self._settings.fingerprint() if known is None else known.fingerprint
        is_table = type(checkpoint) in (Checkpoint, ToldCheckpoint)  # no GGUF file's
        table = pack_table(checkpoint) if is_table else b""
        info = {"protocol": PROTOCOL, **identity}
        self._offered = info, OfferedWeights(packed, fingerprint, table)

    def listen(self, number: int) -> None:
        """Begins to serve the weights of this rank, if that is set. ConfigError names the
        setting."""
        url = self._settings.listen
        if url is None or self._server is not None:
            return
        if self._offered is None:
            logger.warning("weights_listen: these weights cannot be given to others")
            return
        info, offered = self._offered
        own = rank_url(url, number)
        try:
            listener = listen(
                own,
                key=self._settings.key,
                info=info,
                window_bytes=WINDOW_BYTES,
                max_peers=MAX_PEERS,
                shared=offered.packed.shared if self.wants_shared else None,
            )
        except (TransportError, OSError, ValueError, ImportError) as error:
            raise ConfigError(f"weights_listen: {_with_url(own, error)}") from error
        self._server = WeightServer(listener, offered, self._settings.rate)
        logger.info("other replicas pull the weights at %s", listener.url)

    def close(self) -> None:
        """Serves no longer."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def forget(self) -> None:
        """Serves no longer, and refers to no weights any more."""
        self.close()
        self._offered = None


def _with_url(url: str, error: Exception) -> str:
    """Returns an error's text with the URL, which the text may have already."""
    text = str(error)
    return text if url in text else f"{url}: {text}"


def rank_url(url: str, number: int) -> str:
    """Returns where a rank of the replica at this address serves: the port, or the name, of the
    address is that of rank 0."""
    if number == 0:
        return url
    scheme = url.partition("://")[0]
    if scheme in ("tcp", "rdma"):
        head, _, port = url.rpartition(":")
        if port.isdecimal() and 0 < int(port) < 65536 - number:
            return f"{head}:{int(port) + number}"
        raise ConfigError(f"weights_from and weights_listen: {url} has no port for rank {number}")
    return f"{url}.{number}"
