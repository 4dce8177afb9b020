"""A model of sequences on the KV manager that knows what every page must hold.

Each computed token writes a value that stands for all tokens up to it, as real K/V does, in each
layer group. A sequence that gets a wrong page, or loses one, reads a wrong value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memory.pages.kv_range import Range
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import check_mapping, make_kv


@dataclass
class ModelSequence:
    tokens: list[int]
    salt: str
    kv_range: Range
    num_computed: int
    keys: list[bytes] = field(default_factory=list)


class KVModel:
    """Sequences of token ids on a small pool."""

    def __init__(self, **settings) -> None:
        defaults = {"num_pages": 20, "num_ranges": 5, "max_model_len": 40}
        self.kv, self.memory = make_kv(**(defaults | settings))
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        self.running: list[ModelSequence] = []
        self.num_hit_tokens = 0
        self.max_rows = settings.get("max_rows") or self.kv.max_model_len

    def open(self, tokens: list[int], salt: str) -> bool:
        keys: list[bytes] = []
        self.hasher.extend(keys, tokens, salt)
        hit = self.kv.match(keys, len(tokens) - 1)
        if not self.kv.can_fit(len(tokens), hit=hit):
            return False
        item = self.kv.open(len(tokens), hit)
        num_computed = hit.num_tokens if hit else 0
        self.num_hit_tokens += num_computed
        self.running.append(ModelSequence(list(tokens), salt, item, num_computed, keys))
        return True

    def advance(self, sequence: ModelSequence, num_tokens: int) -> bool:
        """Computes up to num_tokens more; a finished prompt gets one more token."""
        if sequence.num_computed == len(sequence.tokens):
            if len(sequence.tokens) == self.kv.max_model_len:
                return False
            sequence.tokens.append(len(sequence.tokens) % 3)
        num_tokens = min(num_tokens, self.max_rows)
        end = min(len(sequence.tokens), sequence.num_computed + num_tokens)
        if not self.kv.grow(sequence.kv_range, end, sequence.num_computed):
            return False
        self.kv.commit([sequence.kv_range])
        self.check_reads(sequence)
        for position in range(sequence.num_computed, end):
            for number in range(len(self.kv.layout.groups)):
                for page in self._pages(sequence, number, position):
                    page[position] = self._value(sequence, number, position)
        sequence.num_computed = end
        self.hasher.extend(sequence.keys, sequence.tokens, sequence.salt)
        self.kv.insert_prefix(sequence.kv_range, sequence.keys, end)
        return True

    def num_missing(self, sequence: ModelSequence, num_tokens: int) -> int:
        """Returns the number of pages that it needs to have so many tokens."""
        parts = sequence.kv_range.parts
        return sum(max(0, p.group.slots_for(num_tokens) - len(p.pages)) for p in parts)

    def map_ahead(self) -> None:
        self.kv.map_ahead([(s.kv_range, s.num_computed + 3) for s in self.running])

    def close(self, sequence: ModelSequence) -> None:
        self.kv.close(sequence.kv_range)
        self.running.remove(sequence)

    def _pages(self, sequence: ModelSequence, number: int, position: int) -> list[dict[int, int]]:
        """Returns the pages of a group that hold bytes of the position's tile."""
        group, page_bytes = self.kv.layout.groups[number], self.kv.page_bytes
        tile_bytes = group.tile_tokens * group.token_bytes
        begin = position // group.tile_tokens * tile_bytes
        last = (begin + tile_bytes - 1) // page_bytes
        pages = sequence.kv_range.parts[number].pages[begin // page_bytes : last + 1]
        assert -1 not in pages, f"position {position} of group {number} is released"
        return [self.memory.content.setdefault(page, {}) for page in pages]

    @staticmethod
    def _value(sequence: ModelSequence, number: int, position: int) -> int:
        return hash((number, sequence.salt, *sequence.tokens[: position + 1]))

    def check_reads(self, sequence: ModelSequence) -> None:
        """Checks that kernels read the sequence's own values from now on."""
        for number, group in enumerate(self.kv.layout.groups):
            first = 0
            if group.window is not None:
                first = max(0, sequence.num_computed + 1 - group.window)
                if group.by_block:
                    first = sequence.num_computed // group.window * group.window
            first -= first % group.read_block
            for position in range(first, sequence.num_computed):
                for page in self._pages(sequence, number, position):
                    expected = self._value(sequence, number, position)
                    assert page.get(position) == expected, (number, position)

    def check(self) -> None:
        self.kv.check_integrity()
        for sequence in self.running:
            assert len(sequence.kv_range.pages) <= self.kv.pages_for(len(sequence.tokens))
            # otherwise copies are not committed
            if not any(part.copies for part in sequence.kv_range.parts):
                self.check_reads(sequence)

    def finish(self) -> None:
        for sequence in list(self.running):
            self.close(sequence)
        self.kv.check_integrity()
        assert self.kv.num_in_use == 0
        self.kv.close_all()
        check_mapping(self.kv, self.memory)
        assert not self.memory.mapped
        assert self.kv.num_mapped == 0
        self.kv.check_integrity()
