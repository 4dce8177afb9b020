"""The attention seam: the protocol through which models use K/V.

Attention is planned once per step (or part of a step) and called once per layer: `begin` as soon
as q exists, `finish` with k and v, and `wait` where the result is needed. Locally `begin` costs
nothing and the result exists when `finish` returns. A remote implementation sends q in `begin` and
waits in `wait`. Models never see ranges or pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from memory.policies.setting import KVPolicy
from ops.states import StateSegments


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention parameters of one layer.

    window: the keys a row sees, itself included. chunk: a row sees the keys of its own chunk of so
    many positions. soft_cap: scores become cap * tanh(score / cap); 0: none. sinks: for each head a
    logit that takes part in the softmax and has no value. shares: the earlier layer, in the same
    list, whose K/V this layer reads; it has none of its own, and its window is within the owner's.
    value_dim: V is the first value_dim values of K and is not stored (latent attention,
    num_kv_heads is 1); None: V is stored. is_late: its rows may be computed some steps after those
    of the other layers (a head that drafts), so none of its K/V is for recent tokens alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float = 0.0
    sinks: tuple[float, ...] | None = None
    shares: int | None = None
    value_dim: int | None = None
    chunk: int | None = None
    is_late: bool = False


def kv_owner(layers: Sequence[AttentionLayer], index: int) -> int:
    """Returns the layer whose K/V a layer reads: the one it shares, or itself. ValueError if the
    layer cannot read the other's K/V."""
    layer = layers[index]
    if layer.shares is None:
        return index
    owner = layers[layer.shares] if 0 <= layer.shares < index else None
    if owner is None or owner.shares is not None:
        raise ValueError(f"layer {index} cannot share the K/V of layer {layer.shares}")
    if owner.chunk != layer.chunk:
        raise ValueError(f"layers {layer.shares} and {index} share K/V, but differ in their chunks")
    if _kv_shape(owner) != _kv_shape(layer):
        raise ValueError(f"layers {layer.shares} and {index} share K/V, but differ in their heads")
    if owner.window is not None and (layer.window is None or layer.window > owner.window):
        raise ValueError(f"layer {index} sees keys that layer {layer.shares} does not keep")
    return layer.shares


def _kv_shape(layer: AttentionLayer) -> tuple[int, int, int | None]:
    return layer.num_kv_heads, layer.head_dim, layer.value_dim


def layers_in(layers: Sequence[AttentionLayer], numbers: Sequence[int]) -> list[AttentionLayer]:
    """Returns some of a model's layers, among them the owner of each one's K/V. Their `shares` are
    numbers in the list that is returned."""
    chosen = [layers[i] for i in numbers]
    return [x if x.shares is None else replace(x, shares=numbers.index(x.shares)) for x in chosen]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The K/V side of one step. Sequences are in the order of their rows, decode rows first.

    num_decodes: the number of leading sequences whose rows are decoded: the result of each is to
    the last bit that of a step with this row alone. Most have one row. starts: where each
    sequence's range begins, in tokens. num_rows: each sequence's rows. kv_lens: its keys after this
    step. prompt_lens: the tokens of its prompt: where decoded tokens select what they read, rows
    after these do, however they are computed. None: all rows read everything. policies: what
    each sequence's rows select by, where they select; None, for one or for all: the engine's own.
    """

    num_decodes: int
    starts: Sequence[int]
    num_rows: Sequence[int]
    kv_lens: Sequence[int]
    prompt_lens: Sequence[int] | None = None
    policies: Sequence[KVPolicy | None] | None = None


def single_rows(step: AttentionStep) -> AttentionStep:
    """Returns the step with a sequence for each decoded row, which ends with the row's key."""
    n = step.num_decodes
    decoded = list(zip(step.starts[:n], step.num_rows[:n], step.kv_lens[:n], strict=True))
    ends = [length - rows + 1 + i for _, rows, length in decoded for i in range(rows)]
    starts = [start for start, rows, _ in decoded for _ in range(rows)]
    prompts, policies = step.prompt_lens, step.policies
    if prompts is not None:
        own = zip(prompts[:n], step.num_rows[:n], strict=True)
        prompts = [*[length for length, rows in own for _ in range(rows)], *prompts[n:]]
    if policies is not None:
        each = zip(policies[:n], step.num_rows[:n], strict=True)
        policies = [*[policy for policy, rows in each for _ in range(rows)], *policies[n:]]
    return AttentionStep(
        len(starts),
        [*starts, *step.starts[n:]],
        [*[1] * len(starts), *step.num_rows[n:]],
        [*ends, *step.kv_lens[n:]],
        prompts,
        policies,
    )


class Ticket(NamedTuple):
    """A layer and its queries, which `begin` returns and `finish` takes. begun: the sums over
    earlier keys, where `begin` attends."""

    layer: int
    q: Tensor
    begun: Tensor | None = None


Rotation = tuple[Tensor, Tensor]
"""cos and sin, [T, R/2] fp32, as Backend.rotary takes them."""


class Pending(Protocol):
    """The attention of one layer, which may still be computed."""

    def wait(self) -> Tensor:
        """Waits for the result and returns it, [T, H, D]. It is called once."""


@dataclass(slots=True)
class Finished:
    """A Pending whose result exists already."""

    out: Tensor

    def wait(self) -> Tensor:
        return self.out


class Attention(Protocol):
    """Attention for the rows of one plan. q is [T, H, D] and rotated, k and v are [T, Hk, D]; rows
    are packed as planned."""

    def begin(self, layer: int, q: Tensor) -> Ticket:
        """Starts a layer with its queries. The step's K/V is not yet written."""

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        """Rotates k, writes k and v, and attends. k may be overwritten. The implementation rotates
        k, so that it can do so while it writes k.

        k and v are None for a layer that shares the K/V of another, which has finished in this
        step; v is None where V is a part of K. There the rotation turns the first values of k
        after value_dim, and the result is [T, H, value_dim].
        """


class DraftedRows(Protocol):
    """What a layer's operators need where sequences have drafts: before the rows of such a
    sequence come those rows of its last draft that were accepted, whose states were not kept."""

    def merged(self, rows: Tensor) -> Tensor:
        """Returns the rows with accepted ones before them, and keeps the drafted ones. rows: [T,
        values], from which the layer's operators compute everything."""

    def own(self, out: Tensor) -> Tensor:
        """Returns the step's rows of what was computed for merged rows."""


class LayerState(NamedTuple):
    """The states of one layer in all records, and the segments of the step's rows: what the
    operators of ops/states.py take. heads: None for a layer with a convolution alone. drafted: if
    it is not None, the segments are those of merged rows."""

    conv: Tensor
    heads: Tensor | None
    segments: StateSegments
    drafted: DraftedRows | None = None


class StepStates(Protocol):
    """The states of the rows of one plan."""

    def layer(self, number: int) -> LayerState:
        """Returns those of a layer, by its number among the layers with states."""


@runtime_checkable
class HasStates(Protocol):
    """Attention of a model some of whose layers have states."""

    @property
    def states(self) -> StepStates: ...


class ExpectsQueries(ABC):
    """Attention that can begin to fetch K/V if it is told early about what a layer's queries will
    be. A class of its own, because each step asks for it, and asking for a Protocol takes long."""

    @abstractmethod
    def num_expected(self) -> int:
        """Returns how many of the step's first rows it wants to know about; 0: none. Who calls it
        tells, before each layer but the first one."""

    @abstractmethod
    def expect(self, layer: int, q: Tensor) -> None:
        """Takes about what these rows' q will be in `begin` of a layer, [num_expected, H, D]. No
        result depends on it."""


class PlannedAttention(Protocol):
    """The runner's side of the seam."""

    @property
    def is_remote(self) -> bool:
        """Whether other machines compute attention, so that other work can be done between `finish`
        and `wait`. Otherwise results exist when `finish` returns."""

    def plan(self, step: AttentionStep) -> Attention:
        """Prepares what all layers share. The memory for the step is committed.

        Plans for different sequences may be in use at once, with their layers called in turn.
        """
