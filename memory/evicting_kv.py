"""K/V memory whose sequences drop tokens: a range that has become shorter gives pages back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.pages.kv_range import Range, RangePart


class Mover(Protocol):
    """Moves the tokens of one range that stay to its first places."""

    def move(self) -> None:
        """Moves them within the range."""

    def take(self) -> object:
        """Copies them to memory outside of the pages."""

    def put(self, taken: object) -> None:
        """Writes the copy to the range's first places, which are mapped to other pages by now."""


class EvictingKV(KVManager):
    """A KVManager of layer groups without windows. Range.dropped tells how many of a sequence's
    tokens no group holds any more: the token at position p, if it is newer than the last move, is
    at p - dropped. A group may hold fewer tokens than the range has (RangePart.num_fewer): its
    tokens are at so much lower places. num_dropped_tokens: all that were dropped since the
    start."""

    num_dropped_tokens = 0

    def can_shrink(self, target: Range, counts: Sequence[int]) -> bool:
        """Returns whether there are pages for `shrink`: pages that the prefix cache or another
        range holds are not written to, so that others take their place."""
        if not self._is_shared(target, counts):
            return True
        index, references = self.prefixes.index, self.allocator.num_references
        freed = sum([references(page) - (page in index) == 1 for page in target.pages])
        return self.layout.pages_of(counts) <= self.num_available + freed

    def shrink(self, target: Range, counts: Sequence[int], dropped: int, mover: Mover) -> None:
        """Lets `mover` move what stays to the first places, and releases the pages that are left.

        counts: the tokens that each group holds from now on; the range has the most of them.
        dropped: the tokens of the sequence that no group holds any more. Raises OSError if pages
        cannot be mapped; then what the range held is lost.
        """
        assert all(part.group.window is None for part in target.parts), "no windows"
        self.space.settle()
        self.commit([target])
        is_shared = self._is_shared(target, counts)
        taken: object = None
        if is_shared:
            taken = mover.take()
        else:
            mover.move()
        for part, count in zip(target.parts, counts, strict=True):
            self._release_from(part, 0 if is_shared else part.group.slots_for(count))
            part.num_fewer = max(counts) - count
        if is_shared:  # all pages that can be free are free before others are taken
            for part, count in zip(target.parts, counts, strict=True):
                num_slots = part.group.slots_for(count)
                self._mapper.extend(part, num_slots)
                self._num_held += num_slots
        self.num_dropped_tokens += dropped - target.dropped
        target.dropped = dropped
        target.promised_tokens = 0
        self._update_promise(target)
        self._note_growth(target)
        if all(part.is_committed for part in target.parts):
            self._mapper.due.discard(target.index)
        if is_shared:
            self.commit([target])
            mover.put(taken)

    def _release_from(self, part: RangePart, first: int) -> None:
        """Releases the pages of the slots from `first` on."""
        released = part.pages[first:]
        del part.pages[first:]
        part.num_mapped = min(part.num_mapped, first)
        part.num_offered = part.num_cached = 0
        for page in released:
            self.prefixes.release(page)
        self._num_held -= len(released)

    def _is_shared(self, target: Range, counts: Sequence[int]) -> bool:
        references = self.allocator.num_references
        return any(
            references(page) > 1
            for part, count in zip(target.parts, counts, strict=True)
            for page in part.pages[: part.group.slots_for(count)]
        )

    def close(self, target: Range) -> None:
        super().close(target)
        target.dropped = 0


def changes_with_rows(kv: KVMemory) -> bool:
    """Returns whether a row changes more than its own K/V, such as a state or the scores of keys,
    so that a step that failed cannot be computed again as it was."""
    return kv.state_interval is not None or isinstance(kv, EvictingKV)
