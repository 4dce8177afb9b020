"""Holders of segments for a model on several ranks: each rank has a session of its own on each
holder, for its layers and K/V heads.

One accounting serves all ranks. Its edits of the holders' pages travel to the ranks beside those of
the ranks' own memory, and each rank sends them on with its next plan. So do the places of segments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memory.attention.seam import AttentionStep
from memory.edit_recorder import EditRecorder, MemoryEdit
from memory.nodes.attach import AttachRequest
from memory.nodes.edit_log import EditLog
from memory.nodes.node_link import NodeLink
from memory.nodes.node_set import Connect, NodePartition
from memory.nodes.placement import Shard
from memory.nodes.segment_links import Locate
from memory.nodes.wire import Edit, EditKind

_ATTACH_S = 5.0
# Where an edit's kind has its holder and the part of its ranges; holder 0 is the rank's own memory.
_KIND_BITS, _HOLDER_BITS = 4, 16
_KIND_MASK, _HOLDER_MASK = (1 << _KIND_BITS) - 1, (1 << _HOLDER_BITS) - 1
_PART_SHIFT = _KIND_BITS + _HOLDER_BITS


@dataclass(frozen=True, slots=True)
class HolderGeometry:
    """What sessions of all ranks on all holders have alike: the engine's name, to which a rank adds
    its number, the tokens of a page, the page slots of a range, ranges, and rows of a message."""

    engine: str
    page_tokens: int
    num_places: int
    num_ranges: int
    max_rows: int

    @classmethod
    def from_json(cls, content: object) -> HolderGeometry:
        """Parses a geometry. Raises ValueError for anything else."""
        if not isinstance(content, dict):
            raise ValueError("the holders' geometry is no object")
        numbers = [content.get(name) for name in cls.__slots__[1:]]
        engine = content.get("engine")
        if not isinstance(engine, str) or not all(type(x) is int and x > 0 for x in numbers):
            raise ValueError("the holders' geometry is not what it should be")
        return cls(engine, *[x for x in numbers if isinstance(x, int)])


class HeldEditRecorder(EditRecorder):
    """Records edits of the ranks' own memory, and takes those of holders' pages from their logs."""

    def __init__(self, page_bytes: int) -> None:
        super().__init__(page_bytes)
        self._logs: list[EditLog] = []

    def record(self, logs: Sequence[EditLog]) -> None:
        """Takes the edits of these logs, one for each holder, from now on."""
        self._logs = list(logs)
        for log in logs:
            log.on_release = lambda: self.on_release()

    def take(self) -> list[MemoryEdit]:
        edits = super().take()
        for holder, log in enumerate(self._logs, 1):
            for kind, part, slot, page, count in log.take():
                tag = kind | holder << _KIND_BITS | part << _PART_SHIFT
                edits.append(MemoryEdit(tag, slot, page, count))
        return edits


class Granted(NamedTuple):
    """Pages and mappings that a holder has granted."""

    num_pages: int
    num_mappings: int


class RankHolders:
    """The sessions of one rank. Holder i is partition i."""

    def __init__(
        self, urls: Sequence[str], request: AttachRequest, connect: Connect, segment_tokens: int
    ) -> None:
        """request: of this rank, but for the epoch and the pages."""
        # their edits arrive as they are to be sent, so their sizes do not matter
        self.partitions = [NodePartition([url], EditLog(1, 1, [1])) for url in urls]
        self._request = request
        self._connect = connect
        self._length = segment_tokens
        self._epochs = [0] * len(urls)
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def attach(self, holder: int, num_pages: int, epoch: int, connect_s: float) -> Granted:
        """Attaches to a holder with up to num_pages pages, in place of an earlier session. Raises
        TransportError and OSError."""
        self.detach(holder)
        self._epochs[holder] = epoch
        partition = self.partitions[holder]
        [url] = partition.urls
        link = NodeLink(url, self._connect(url, connect_s), Shard("request", 0, 1), time.monotonic)
        try:
            request = replace(self._request, epoch=epoch, num_pages=num_pages)
            granted = link.attach(request, _ATTACH_S)
        except BaseException:
            link.close()
            raise
        partition.links, partition.num_pages = [link], granted
        return Granted(granted, link.num_mappings)

    def detach(self, holder: int) -> None:
        """Ends the session on a holder, which frees its pages."""
        self.partitions[holder].close()
        self.partitions[holder].edits.take()

    def lost(self) -> list[tuple[int, int]]:
        """Returns the holders whose sessions have ended by themselves, with their epochs."""
        return [
            (holder, self._epochs[holder])
            for holder, partition in enumerate(self.partitions)
            if partition.links and partition.is_lost
        ]

    def put(self, edits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keeps holders' edits, [n, 4], for the next plans; returns those of the rank's memory."""
        holders = edits[:, 0] >> _KIND_BITS & _HOLDER_MASK
        if not holders.any():
            return edits
        for holder, (tag, slot, page, count) in zip(
            holders[holders > 0].tolist(), edits[holders > 0].tolist(), strict=True
        ):
            kind = EditKind(tag & _KIND_MASK)
            edit = Edit(kind, tag >> _PART_SHIFT, slot, page, count)
            self.partitions[holder - 1].edits.add(edit)
        own: npt.NDArray[np.int64] = edits[holders == 0]
        return own

    def use(self, step: AttentionStep, places: npt.NDArray[np.int64]) -> None:
        """Takes the places of a step's segments on holders, as `places_of` returns them."""
        wanted = _held(step, self._length)
        if len(wanted) != len(places):
            raise ValueError(f"places of {len(places)} segments, not {len(wanted)}")
        found = [(int(holder), int(index)) for holder, index in places.tolist()]
        self._places = dict(zip(wanted, found, strict=True))

    def locate(self, start: int, segment: int) -> tuple[int, int]:
        """Returns a segment's holder, and its range there, by the start of its sequence's range."""
        return self._places[start, segment]

    def close(self) -> None:
        for partition in self.partitions:
            partition.close()


def _held(step: AttentionStep, segment_tokens: int) -> list[tuple[int, int]]:
    """Returns the segments of a step's sequences that are on holders: (start of the sequence's
    range, number of the segment)."""
    return [
        (start, segment)
        for start, kv_len in zip(step.starts, step.kv_lens, strict=True)
        for segment in range(1, -(-kv_len // segment_tokens))
    ]


def places_of(step: AttentionStep, segment_tokens: int, locate: Locate) -> npt.NDArray[np.int64]:
    """Returns the holder and the range there of each segment of a step's sequences that is on a
    holder, [n, 2]."""
    found = [locate(start, segment) for start, segment in _held(step, segment_tokens)]
    return np.array(found, dtype=np.int64).reshape(len(found), 2)
