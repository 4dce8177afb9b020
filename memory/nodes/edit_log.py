"""The address space of memory nodes, for the engine's K/V accounting: it records edits, which the
nodes apply with the next plan."""

from __future__ import annotations

from collections.abc import Sequence

from memory.edit_recorder import RecordedMemory
from memory.nodes.wire import Edit, EditKind


class EditLog(RecordedMemory[Edit]):
    """A VirtualMemory whose edits name range parts and page slots."""

    def __init__(self, page_bytes: int, num_ranges: int, range_slots: Sequence[int]) -> None:
        """range_slots is the number of a range's page slots in each layer group."""
        super().__init__(page_bytes)
        self._num_ranges = num_ranges
        self._range_bytes = [slots * page_bytes for slots in range_slots]

    def add(self, edit: Edit) -> None:
        """Adds an edit that another log has recorded."""
        self._edits.append(edit)
        if edit.kind is EditKind.RELEASE:
            self.on_release()

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        part, slot = self._locate(offset)
        self._edits.append(Edit(EditKind.MAP, part, slot, first_page, num_pages))

    def unmap(self, offset: int, num_pages: int) -> None:
        part, slot = self._locate(offset)
        self._edits.append(Edit(EditKind.UNMAP, part, slot, 0, num_pages))

    def copy_page(self, source: int, target: int) -> None:
        self._edits.append(Edit(EditKind.COPY, 0, source, target, 1))

    def release(self, first_page: int, num_pages: int) -> None:
        self._edits.append(Edit(EditKind.RELEASE, 0, 0, first_page, num_pages))
        self.on_release()

    def _locate(self, offset: int) -> tuple[int, int]:
        for group, range_bytes in enumerate(self._range_bytes):
            if offset < range_bytes * self._num_ranges:
                index, rest = divmod(offset, range_bytes)
                return group * self._num_ranges + index, rest // self.page_bytes
            offset -= range_bytes * self._num_ranges
        raise AssertionError(f"{offset} bytes behind the last range")
