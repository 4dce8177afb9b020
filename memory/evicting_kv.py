"""K/V memory whose sequences drop tokens: a range that has become shorter gives pages back."""

from __future__ import annotations

from typing import Protocol

from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.pages.kv_range import Range


class Mover(Protocol):
    """Moves the tokens of one range that stay to its first places."""

    def move(self) -> None:
        """Moves them within the range."""

    def take(self) -> object:
        """Copies them to memory outside of the pages."""

    def put(self, taken: object) -> None:
        """Writes the copy to the range's first places, which are mapped to other pages by now."""


class EvictingKV(KVManager):
    """A KVManager of one layer group without a window. Range.dropped tells how many of a sequence's
    tokens its range holds no more: the token at position p, if it is newer than the last move, is
    at p - dropped. num_dropped_tokens: all that were dropped since the start."""

    num_dropped_tokens = 0

    def can_shrink(self, target: Range, num_tokens: int) -> bool:
        """Returns whether there are pages for `shrink`: pages that the prefix cache or another
        range holds are not written to, so that others take their place."""
        if not self._is_shared(target, num_tokens):
            return True
        index, references = self.prefixes.index, self.allocator.num_references
        (part,) = target.parts
        freed = sum([references(page) - (page in index) == 1 for page in part.pages])
        return part.group.slots_for(num_tokens) <= self.num_available + freed

    def shrink(self, target: Range, num_tokens: int, dropped: int, mover: Mover) -> None:
        """Lets `mover` move what stays to the first num_tokens places, and releases the pages that
        are left. dropped: the tokens of the sequence that the range does not hold any more.
        Raises OSError if pages cannot be mapped; then what the range held is lost."""
        (part,) = target.parts
        assert not part.num_released and part.group.window is None, "one group, no window"
        self.space.settle()
        self.commit([target])
        num_slots = part.group.slots_for(num_tokens)
        num_before = len(part.pages)
        is_shared = self._is_shared(target, num_tokens)
        taken: object = None
        if is_shared:
            taken = mover.take()
        else:
            mover.move()
        kept = 0 if is_shared else num_slots
        released = part.pages[kept:]
        del part.pages[kept:]
        part.num_mapped = min(part.num_mapped, kept)
        part.num_offered = part.num_cached = 0
        for page in released:
            self.prefixes.release(page)
        if is_shared:
            self._mapper.extend(part, num_slots)
        self._num_held += num_slots - num_before
        self.num_dropped_tokens += dropped - target.dropped
        target.dropped = dropped
        target.promised_tokens = 0
        self._update_promise(target)
        self._note_growth(target)
        if part.is_committed:
            self._mapper.due.discard(target.index)
        if is_shared:
            self.commit([target])
            mover.put(taken)

    def _is_shared(self, target: Range, num_tokens: int) -> bool:
        (part,) = target.parts
        references = self.allocator.num_references
        return any(references(page) > 1 for page in part.pages[: part.group.slots_for(num_tokens)])

    def close(self, target: Range) -> None:
        super().close(target)
        target.dropped = 0


def changes_with_rows(kv: KVMemory) -> bool:
    """Returns whether a row changes more than its own K/V, such as a state or the scores of keys,
    so that a step that failed cannot be computed again as it was."""
    return kv.state_interval is not None or isinstance(kv, EvictingKV)
