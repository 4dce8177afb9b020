"""Ranges without a sequence: which of them the next one gets, and what they still show. Integers
only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memory.pages.address_space import AddressSpace
from memory.pages.kv_range import PrefixHit, Range
from memory.pages.layer_groups import PageLayout


class IdleRanges:
    """They go on showing their last pages in the address space; nobody looks there."""

    def __init__(self, ranges: Sequence[Range], layout: PageLayout, space: AddressSpace) -> None:
        """All of them are idle."""
        self._ranges = ranges
        self._layout = layout
        self._space = space
        self._indices = {item.index for item in ranges}

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, index: object) -> bool:
        return index in self._indices

    def take(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """The best one for so many tokens."""
        found = self.best(num_tokens, hit)
        self._indices.discard(found.index)
        return found

    def put_back(self, item: Range) -> None:
        self._indices.add(item.index)

    def best(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """The one that shows the hit's pages already, else the best fit: the fewest mapped pages
        that suffice, else the fullest."""
        need = self._layout.groups[0].slots_for(num_tokens)
        shown = self._space.mapped
        first, shared = (hit.parts[0].first, hit.parts[0].shared) if hit else (0, [])
        if shared:
            last = first + len(shared) - 1
            for index in self._indices:
                pages = shown(index)
                # Many may show the beginning: where the last page is another one, no list is
                # compared.
                is_like = last < len(pages) and pages[last] == shared[-1]
                if is_like and self._space.maps(index, shared, first):
                    return self._ranges[index]
        indices = list(self._indices)
        sizes = self._space.num_mapped(indices)
        size = min([size for size in sizes if size >= need], default=max(sizes))
        return self._ranges[indices[sizes.index(size)]]

    @property
    def places(self) -> Iterator[int]:
        """Their parts' numbers in the address space."""
        return (part.index for i in self._indices for part in self._ranges[i].parts)

    def unmap(self, limit: int) -> None:
        """What they show, the most first, until there are fewer mappings than that in all."""
        for index in sorted(self.places, key=lambda i: -len(self._space.mapped(i))):
            if self._space.num_mappings < limit:
                return
            self._space.try_unmap(index)
