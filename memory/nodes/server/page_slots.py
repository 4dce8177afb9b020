"""The page slots of an engine's session on a memory node, as the engine's edits map them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch

from memory.nodes.attach import NodeLayout
from memory.nodes.wire import Edit, EditKind, ErrorCode, WireError
from memory.pages.kv_range import UNMAPPED

_SMALL_COUNT = 64  # page slots for which a loop is faster than a tensor


class PageSlots:
    """The page at each page slot of each range part, as the engine's edits map them."""

    def __init__(self, layout: NodeLayout, num_pages: int) -> None:
        self._layout = layout
        self._num_pages = num_pages
        self._num_parts = layout.request.num_ranges * len(layout.groups)
        # By part; 4 bytes a slot, and attach.py bounds the number of slots.
        self._mapped: dict[int, array[int]] = {}
        self._checked: dict[int, tuple[int, int]] = {}  # slots [low, high) that were found mapped
        self.num_mappings = 0
        """Counted as Linux does: runs of consecutive pages, and the gaps between them."""

    def check_edit(self, edit: Edit) -> None:
        """Raises WireError if the edit exceeds what was granted."""
        kind, part, slot, page, count = edit
        if kind is EditKind.COPY:
            if slot >= self._num_pages or page >= self._num_pages:
                raise WireError(ErrorCode.RANGE, f"copy of page {slot} to {page}")
            return
        if kind is not EditKind.UNMAP and (count < 1 or page + count > self._num_pages):
            raise WireError(ErrorCode.RANGE, f"pages {page} to {page + count}")
        if kind is EditKind.RELEASE:
            return
        if part >= self._num_parts:
            raise WireError(ErrorCode.RANGE, f"range part {part}")
        slots = self._layout.request.num_places[part // self._layout.request.num_ranges]
        if count < 1 or slot + count > slots:
            raise WireError(ErrorCode.RANGE, f"page slots {slot} to {slot + count} of {slots}")

    def record(self, edit: Edit) -> None:
        """Records a MAP or UNMAP that was applied."""
        _, part, slot, page, count = edit
        is_map = edit.kind is EditKind.MAP
        if not is_map and part not in self._mapped:
            return
        mapped = self._mapped.setdefault(part, array("i"))
        end = slot + count
        if is_map and len(mapped) < end:
            mapped.extend(_unmapped(end - len(mapped)))
        end = min(end, len(mapped))
        self.num_mappings -= _num_breaks(mapped, slot, end)
        if is_map:
            mapped[slot:end] = array("i", range(page, page + count))
        else:
            mapped[slot:end] = _unmapped(end - slot)
            self._checked.pop(part, None)
        self.num_mappings += _num_breaks(mapped, slot, end)
        if not is_map and not slot and end == len(mapped):
            del self._mapped[part]

    def mapped(self, part: int) -> Sequence[int]:
        """Returns the pages at a part's slots, from the first one on; UNMAPPED marks empty
        slots."""
        return self._mapped.get(part, array("i"))

    def require(self, part: int, first: int, end: int) -> None:
        """Raises WireError unless all slots of [first, end) of the part are mapped."""
        low, high = self._checked.get(part, (0, 0))
        if first >= end or (low <= first and end <= high):
            return
        if not low <= first <= high:
            low, high = first, first
        mapped = self._mapped.get(part)
        if mapped is None or end > len(mapped) or UNMAPPED in mapped[high:end]:
            raise WireError(
                ErrorCode.RANGE, f"page slots {first} to {end} of part {part} are not mapped"
            )
        self._checked[part] = (low, end)


def _num_breaks(mapped: array[int], first: int, end: int) -> int:
    """Returns how many of the slots `first` to `end` begin a mapping, or a gap after one."""
    pages = array("i", [mapped[first - 1] if 0 < first <= len(mapped) else UNMAPPED])
    pages += mapped[first : end + 1]
    if end >= len(mapped):
        pages.append(UNMAPPED)
    if len(pages) < _SMALL_COUNT:
        return sum([not _continues(one, other) for one, other in pairwise(pages)])
    every = torch.frombuffer(pages, dtype=torch.int32)
    before, page = every[:-1], every[1:]
    goes_on = (page == before + 1) & (before != UNMAPPED) & (page != UNMAPPED)
    goes_on |= (page == UNMAPPED) & (before == UNMAPPED)
    return len(page) - int(goes_on.sum())


def _continues(before: int, page: int) -> bool:
    """Returns whether a slot continues the mapping or gap of the slot before it."""
    return page == before == UNMAPPED or (page == before + 1 and UNMAPPED not in (before, page))


def _unmapped(count: int) -> array[int]:
    return array("i", [UNMAPPED]) * count
