"""A step's queries on a node where ranges are segments: partial results, their rows' own keys
included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memory.attention.partial import PartialAttention
from memory.attention.seam import AttentionStep, Ticket
from memory.nodes.wire import Query
from ops.backend import Partial


@dataclass(slots=True)
class BegunSegments:
    """A layer's queries whose own k and v are due. rest: q or the result of the other ones."""

    own: Ticket
    rest: Tensor | Partial | None


class SegmentQueries:
    """The planned queries of one layer group. Those with rows of their own come first."""

    def __init__(
        self, attention: PartialAttention, range_tokens: int, queries: Sequence[Query]
    ) -> None:
        own = [query for query in queries if query.num_own]
        rest = [query for query in queries if not query.num_own]
        self._own = attention.own(_step(own, range_tokens)) if own else None
        self._rest = attention.prefix(_step(rest, range_tokens)) if rest else None
        self.num_own_rows = sum([query.num_rows for query in own])
        # a step's later rows read what its earlier ones write
        self._is_late = bool({query.range for query in own} & {query.range for query in rest})

    def begin(self, layer: int, q: Tensor) -> BegunSegments:
        """Attends as far as own k and v are not needed. There are rows with own ones."""
        assert self._own is not None, "no query with its own rows"
        own, rest = q[: self.num_own_rows], q[self.num_own_rows :]
        begun = self._own.begin(layer, own)
        if self._rest is None:
            return BegunSegments(begun, None)
        return BegunSegments(begun, rest if self._is_late else self._rest.attend(layer, rest))

    def finish(self, begun: BegunSegments, k: Tensor | None, v: Tensor | None) -> Partial:
        """Writes k and v and attends; returns the results of all queries."""
        assert self._own is not None, "no query with its own rows"
        own, rest = self._own.finish(begun.own, k, v, None), begun.rest
        if rest is None:
            return own
        if isinstance(rest, Tensor):
            assert self._rest is not None, "queries without their own rows"
            rest = self._rest.attend(begun.own.layer, rest)
        return Partial(torch.cat([own.out, rest.out]), torch.cat([own.lse, rest.lse]))

    def attend(self, layer: int, q: Tensor) -> Partial:
        """Attends where no k and v are due; returns the results of all queries."""
        if self._own is not None:
            return self.finish(self.begin(layer, q), None, None)
        assert self._rest is not None, "no query"
        return self._rest.attend(layer, q)


def _step(queries: Sequence[Query], range_tokens: int) -> AttentionStep:
    return AttentionStep(
        sum([query.num_rows == 1 for query in queries]),
        [query.range * range_tokens for query in queries],
        [query.num_rows for query in queries],
        [query.num_keys for query in queries],
    )
