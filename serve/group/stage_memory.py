"""What the engine makes in this machine's memory for the tensor ranks of each stage: an arena, and
a file through which their devices find one another."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence

from serve.group.grid import Grid
from serve.group.links.worker_link import WorkerLink
from serve.group.rank import HostExchange, Rank
from serve.group.siblings import connect_exchange
from serve.group.sizes import SHARED_SPIN_S, arena_bytes, open_exchange, spin_s
from serve.machine import usable_processors
from transport.arena import NO_RANK, Arena

logger = logging.getLogger(__name__)


class StageMemory:
    """The arenas of those stages whose ranks are all on this machine; the ranks of the others
    exchange over connections. They belong to the time between two formings of a group."""

    def __init__(self, own: Rank, grid: Grid) -> None:
        self._own, self._grid = own, grid
        self._arenas: dict[int, Arena] = {}  # by stage
        self._spins_s = SHARED_SPIN_S
        self._meetings: dict[
            int, int
        ] = {}  # by stage whose devices exchange: the file's descriptor

    def make(self, links: Mapping[int, WorkerLink], epoch: int) -> None:
        """Takes memory for all stages; links: by rank. OSError if there is none."""
        config, spec = self._own.source.config, self._own.source.spec
        num_here = 1 + sum(link.host == socket.gethostname() for link in links.values())
        self._spins_s = spin_s(num_here, usable_processors())
        for stage in range(self._grid.num_stages if self._grid.tensor > 1 else 0):
            others = [links[rank] for rank in self._grid.stage_ranks(stage) if rank]
            is_here = all(link.host == socket.gethostname() for link in others)
            if not is_here or config.group_exchange == "connections":
                logger.info("stage %d: its tensor ranks exchange over connections", stage)
                continue
            arena = Arena.create(arena_bytes(config, spec), self._grid.tensor, NO_RANK)
            arena.reset(epoch)
            self._arenas[stage] = arena
            if self._own.device is None:
                continue
            reason = self._why_not_direct([link.device for link in others])
            logger.info(
                "stage %d: its tensor ranks exchange %s",
                stage,
                f"through the host's memory: {reason}" if reason else "between their devices",
            )
            if not reason:
                self._meetings[stage] = os.memfd_create("mergestep-meeting")

    def _why_not_direct(self, devices: Sequence[str]) -> str:
        """Returns why the devices of a stage's ranks do not exchange directly, or "". devices: of
        all ranks but the engine's."""
        assert self._own.device is not None
        if len(devices) < self._grid.tensor:
            devices = [*devices, self._own.room.device]
        if self._own.source.config.group_exchange == "host":
            return 'group_exchange = "host"'
        if len(set(devices)) < len(devices):
            return "ranks share a device"
        if self._own.device.device.type == "cuda" and not _has_nccl():
            return "this torch has no NCCL"
        return ""

    def content(self, rank: int, links: Mapping[int, WorkerLink]) -> dict[str, object]:
        """Returns what a rank's START says of them."""
        stage = self._grid.place(rank).stage
        arena, meeting = self._arenas.get(stage), self._meetings.get(stage)
        return {
            "arena": None if arena is None else arena.path,
            "spins_s": self._spins_s,
            "meeting": None if meeting is None else f"/proc/{os.getpid()}/fd/{meeting}",
            "siblings": self._sibling_urls(stage, links),
        }

    def _sibling_urls(self, stage: int, links: Mapping[int, WorkerLink]) -> list[str] | None:
        """Returns where the tensor ranks of a stage listen; None if they share memory."""
        if self._grid.tensor == 1 or stage in self._arenas:
            return None
        ranks = self._grid.stage_ranks(stage)
        return [links[each].sibling_url if each else "" for each in ranks]

    def open_own(
        self, links: Mapping[int, WorkerLink], key: bytes, epoch: int
    ) -> tuple[HostExchange | None, str | None]:
        """Opens the exchange of the engine's own rank; returns it with the devices' file. Raises
        TransportError and ExchangeError."""
        source, tensor, content = self._own.source, self._own.place.tensor, self.content(0, links)
        urls, meeting = content["siblings"], content["meeting"]
        exchange: HostExchange | None
        if isinstance(urls, list):
            exchange = connect_exchange(source, self._grid, tensor, urls, None, key, epoch)
        else:
            arena, spins_s = content["arena"], content["spins_s"]
            exchange = open_exchange(source, self._grid, tensor, arena, spins_s)
        return exchange, meeting if isinstance(meeting, str) else None

    def abort(self) -> None:
        """Ends a wait of any rank. Any thread may call it."""
        for arena in list(self._arenas.values()):
            arena.abort()

    def reset(self, epoch: int) -> None:
        for arena in self._arenas.values():
            arena.reset(epoch)

    def close(self) -> None:
        self.abort()
        for arena in self._arenas.values():
            arena.close()
        for meeting in self._meetings.values():
            os.close(meeting)
        self._arenas, self._meetings = {}, {}


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()
