"""The attention seam: everything that needs K/V goes through it (DESIGN 3.6).

Planned once per step (or part of a step), called once per layer: `begin` as soon as q exists,
`finish` with k and v, and the result where it is needed. Locally `begin` is free and the result is
there when `finish` returns; a remote implementation ships q in `begin` and waits in `wait`.
Models see only this, never ranges or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What the seam must know of one layer. window: keys a row sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The K/V side of one step; sequences in the order of their rows, decode rows first.

    num_decodes: sequences at the front that have one row each. starts: where each range
    begins, in tokens. num_rows: rows of each sequence. kv_lens: its keys after this step.
    """

    num_decodes: int
    starts: Sequence[int]
    num_rows: Sequence[int]
    kv_lens: Sequence[int]


class Ticket(NamedTuple):
    """What `begin` returns and `finish` takes: the layer and its queries."""

    layer: int
    q: Tensor


Rotation = tuple[Tensor, Tensor]
"""cos, sin: [T, R/2] fp32, as Backend.rotary takes them."""


class Pending(Protocol):
    """Attention of one layer, which may still be under way."""

    def wait(self) -> Tensor:
        """[T, H, D], once. Blocks until it is there."""


@dataclass(slots=True)
class Finished:
    """A Pending whose result is there already."""

    out: Tensor

    def wait(self) -> Tensor:
        return self.out


class Attention(Protocol):
    """The rows of one plan. q: [T, H, D], rotated; k and v: [T, Hk, D]; packed as planned."""

    def begin(self, layer: int, q: Tensor) -> Ticket:
        """Start layer `layer` with its queries. Nothing has been written yet."""

    def finish(self, ticket: Ticket, k: Tensor, v: Tensor, rotation: Rotation | None) -> Pending:
        """Rotate k, write k and v, attend. k may be overwritten.

        Rotating is left to whoever writes, which can do it on the way.
        """


class PlannedAttention(Protocol):
    """The runner's side of the seam."""

    @property
    def is_remote(self) -> bool:
        """Whether other machines compute it: then there is time to use between `finish` and
        `wait`. Where it is not, results are always there."""

    def plan(self, step: AttentionStep) -> Attention:
        """Everything that is the same for all layers. Memory for the step is committed.

        Plans of different sequences may be in use at once: their layers may be called in turn.
        """
