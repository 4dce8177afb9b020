"""Ranges without a sequence, and which of them the next sequence gets. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memory.pages.address_space import AddressSpace
from memory.pages.kv_range import PrefixHit, Range
from memory.pages.layer_groups import PageLayout


class IdleRanges:
    """The ranges that no sequence uses. They stay mapped to their last pages; no kernel reads
    there."""

    def __init__(self, ranges: Sequence[Range], layout: PageLayout, space: AddressSpace) -> None:
        """All ranges are idle at first."""
        self._ranges = ranges
        self._layout = layout
        self._space = space
        self._indices = {item.index for item in ranges}

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, index: object) -> bool:
        return index in self._indices

    def take(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """Removes and returns the best range for a sequence of num_tokens tokens."""
        found = self.best(num_tokens, hit)
        self._indices.discard(found.index)
        return found

    def put_back(self, item: Range) -> None:
        self._indices.add(item.index)

    def best(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """Returns a range that maps the hit's pages already. If there is none, returns the range
        with the fewest mapped pages that suffice for num_tokens tokens, or with the most."""
        need = self._layout.groups[0].slots_for(num_tokens)
        mapped = self._space.mapped
        first, shared = (hit.parts[0].first, hit.parts[0].shared) if hit else (0, [])
        if shared:
            last = first + len(shared) - 1
            for index in self._indices:
                pages = mapped(index)
                # Many ranges may map the first pages. The last one is compared before the lists.
                is_like = last < len(pages) and pages[last] == shared[-1]
                if is_like and self._space.maps(index, shared, first):
                    return self._ranges[index]
        indices = list(self._indices)
        sizes = self._space.num_mapped(indices)
        size = min([size for size in sizes if size >= need], default=max(sizes))
        return self._ranges[indices[sizes.index(size)]]

    @property
    def part_indices(self) -> Iterator[int]:
        """The numbers of their parts in the address space."""
        return (part.index for i in self._indices for part in self._ranges[i].parts)

    def unmap(self, limit: int) -> None:
        """Unmaps idle ranges, those with the most mapped slots first, until fewer than `limit`
        mappings are left in all."""
        for index in sorted(self.part_indices, key=lambda i: -len(self._space.mapped(i))):
            if self._space.num_mappings < limit:
                return
            self._space.try_unmap(index)
