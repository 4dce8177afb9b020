"""Counts the pages of preempted sequences that wait. Integers only: no torch, no asyncio."""

from __future__ import annotations

from memory.kv_memory import KVMemory
from serve.scheduler.sequence import Sequence


class PreemptedPages:
    """The pages that waiting preempted sequences need when they are admitted again."""

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv
        self.num_pages = 0

    def _pages(self, sequence: Sequence) -> int:
        return self._kv.pages_for(sequence.num_tokens) if sequence.num_preemptions else 0

    def add(self, sequence: Sequence) -> None:
        """Counts a sequence that waits from now on."""
        self.num_pages += self._pages(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has as many tokens as when it was added."""
        self.num_pages -= self._pages(sequence)

    def stay_cached_with(self, sequence: Sequence, has_cache: bool) -> bool:
        """Returns whether their K/V would stay in the prefix cache or a page store if this waiting
        sequence were admitted. has_cache: whether there is a prefix cache."""
        if not has_cache or self._kv.prefixes.has_store:
            return has_cache
        need = self._kv.pages_for(sequence.num_tokens) - self._pages(sequence)
        return self._kv.num_in_use + self.num_pages + need <= self._kv.num_pages
