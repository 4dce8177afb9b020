"""Segments: the fixed runs of tokens into which a sequence's K/V is cut.

Segment i of a sequence holds its tokens [i * L, (i + 1) * L). Attention over a sequence is by
definition the fold of its segments' partial results, in order (`Backend.merge_into`). So it has the
same bits wherever the segments are. A row's own key is in the last segment that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memory.attention.seam import AttentionStep


class Piece(NamedTuple):
    """Rows of one sequence of a step over one of its segments.

    first: the first row in the step. start: where the sequence's range begins, in tokens. num_keys:
    the segment's keys after the step. is_own: the rows' own keys are the last of these; otherwise
    the rows are in a later segment.
    """

    first: int
    num_rows: int
    start: int
    segment: int
    num_keys: int
    is_own: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of one segment number that one call computes: all own, or none. Those of one row
    come first."""

    segment: int
    is_own: bool
    items: list[Piece]

    @property
    def begins(self) -> bool:
        """Whether the rows' fold begins with these."""
        return self.segment == 0

    @property
    def rows(self) -> list[int]:
        """The rows in the step, in the order of the items."""
        return [row for it in self.items for row in range(it.first, it.first + it.num_rows)]


def cut(step: AttentionStep, segment_tokens: int) -> list[Piece]:
    """Returns a step's pieces. A segment of a sequence is in one piece of own rows at most, and in
    one of later rows."""
    pieces: list[Piece] = []
    row = 0
    for start, num_rows, kv_len in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
        first = kv_len - num_rows
        for segment in range(-(-kv_len // segment_tokens)):
            begin = segment * segment_tokens
            end = min(kv_len, begin + segment_tokens)
            if end > first:
                own = max(first, begin)
                keys = end - begin
                pieces.append(Piece(row + own - first, end - own, start, segment, keys, True))
            if end < kv_len:  # the rows after the segment
                later = max(first, end)
                at = row + later - first
                pieces.append(Piece(at, kv_len - later, start, segment, segment_tokens, False))
        row += num_rows
    return pieces


def in_order(pieces: list[Piece]) -> list[Pieces]:
    """Groups pieces for one call each. For each row the calls are in the order of its segments:
    its own one is the last."""
    found: dict[tuple[bool, int], list[Piece]] = {}
    for piece in pieces:
        found.setdefault((piece.is_own, piece.segment), []).append(piece)
    return [
        Pieces(segment, is_own, sorted(found[is_own, segment], key=_has_several))
        for is_own, segment in sorted(found)
    ]


def _has_several(piece: Piece) -> bool:
    return piece.num_rows > 1
