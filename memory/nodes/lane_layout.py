"""Where the rows of a step lie in the memory of a lane: both ends compute the same places.

A lane has slots; each holds one step. Of each layer of a step a slot has a place for q and one for
k and v in the node's window, and one for the result in the engine's. A place has the body that a
message with these rows would have (wire.py), for as many rows as were agreed, and then a 64-bit
number: that of the step's plan, once the body is there. Plans have ascending numbers, so a number
also tells that the last step in this slot is over.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from memory.attention.seam import AttentionLayer
from memory.nodes.wire import HEADER_BYTES, ErrorCode, WireError, WireFormat, WireType
from memory.nodes.wire_rows import WireRows

VERSION = 1
NUM_SLOTS = 2
"""Steps whose rows may be under way at once."""
MAX_BYTES = 128 << 20
"""The most memory of one direction, which each end has: a window, and where it sends from."""
_MAX_SLOTS, _MAX_ROWS = 16, 4096
_LINE = 64
_FLOATS = (WireType.FLOAT32, WireType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class LaneTerms:
    """What the engine asks for: slots, the most rows of a step, and the types of its rows."""

    version: int
    num_slots: int
    num_rows: int
    rows: int
    kv: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> LaneTerms:
        """Raises WireError for values that are not possible."""
        names = cls.__slots__
        if not isinstance(content, dict) or not all(type(content.get(x)) is int for x in names):
            raise WireError(ErrorCode.FORM, "a lane without its numbers")
        terms = cls(**{name: content[name] for name in names})
        if terms.version != VERSION:
            raise WireError(ErrorCode.FORM, f"lanes of version {terms.version}, here {VERSION}")
        if not (0 < terms.num_slots <= _MAX_SLOTS and 0 < terms.num_rows <= _MAX_ROWS):
            text = f"a lane of {terms.num_slots} slots of {terms.num_rows} rows"
            raise WireError(ErrorCode.SHAPE, text)
        if terms.rows not in _FLOATS or terms.kv not in _FLOATS:
            raise WireError(ErrorCode.SHAPE, "a lane of rows in 8 bits")
        return terms

    @property
    def wire(self) -> WireFormat:
        return WireFormat(WireType(self.rows), WireType(self.kv))


class LanePlace(NamedTuple):
    """A body begins at `at` and its number is at number_at, in bytes from the window's start."""

    at: int
    number_at: int


class LaneLayout:
    """The places, by slot and layer. is_partial: results are partial ones (PARTIAL)."""

    def __init__(
        self, layers: Sequence[AttentionLayer], terms: LaneTerms, *, is_partial: bool
    ) -> None:
        """layers: those of the shard. Raises WireError if an end would take too much memory."""
        self.terms, self.is_partial = terms, is_partial
        self.rows = [WireRows.of(layer) for layer in layers]
        self.has_kv = [layer.shares is None for layer in layers]
        self.q: list[list[LanePlace]] = []
        self.kv: list[list[LanePlace]] = []
        self.out: list[list[LanePlace]] = []
        count, wire = terms.num_rows, terms.wire
        to_node = to_engine = 0
        for _ in range(terms.num_slots):
            for places in (self.q, self.kv, self.out):
                places.append([])
            for rows in self.rows:
                place, to_node = _place(to_node, rows.q_bytes(count, wire.rows))
                self.q[-1].append(place)
                place, to_node = _place(to_node, rows.kv_bytes(count, wire.kv))
                self.kv[-1].append(place)
                place, to_engine = _place(to_engine, self.out_bytes(rows, count))
                self.out[-1].append(place)
        self.node_bytes, self.engine_bytes = _pages(to_node), _pages(to_engine)
        if max(self.node_bytes, self.engine_bytes) > MAX_BYTES:
            text = f"a lane of {self.node_bytes} and {self.engine_bytes} bytes, {MAX_BYTES} at most"
            raise WireError(ErrorCode.SHAPE, text)

    def out_bytes(self, rows: WireRows, num_rows: int) -> int:
        """Returns the bytes of a result of so many rows."""
        size = rows.partial_bytes if self.is_partial else rows.out_bytes
        return size(num_rows, self.terms.wire.rows)


def _place(first: int, num_bytes: int) -> tuple[LanePlace, int]:
    """Returns a place from `first` on, before which a header fits, and the end of it."""
    at = first + _LINE
    assert HEADER_BYTES <= _LINE
    number_at = at + -(-num_bytes // _LINE) * _LINE
    return LanePlace(at, number_at), number_at + _LINE


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def fitting_rows(layers: Sequence[AttentionLayer], wire: WireFormat, most: int) -> int:
    """Returns the most rows, up to `most`, of which both ends' memory stays within MAX_BYTES."""
    row = [WireRows.of(layer) for layer in layers]
    to_node = sum([x.q_bytes(1, wire.rows) + x.kv_bytes(1, wire.kv) for x in row])
    to_engine = sum([x.partial_bytes(1, wire.rows) for x in row])
    padding = 4 * _LINE * len(row)
    left = MAX_BYTES // NUM_SLOTS - padding - mmap.PAGESIZE
    return max(0, min(most, _MAX_ROWS, left // max(to_node, to_engine)))
