"""The attention seam for several layer groups: each layer uses its group's K/V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from memory.attention.seam import (
    Attention,
    AttentionLayer,
    AttentionStep,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
    kv_owner,
)


class GroupedAttention:
    """Implements PlannedAttention with one PlannedAttention per group. Ranges begin at the same
    token in all groups."""

    def __init__(
        self, groups: Sequence[PlannedAttention], layers_of: Sequence[Sequence[int]]
    ) -> None:
        """layers_of: for each group, the numbers of its layers in the model."""
        self.groups = list(groups)
        self.layers_of = layers_of
        self._positions = {
            layer: (group, position)
            for group, layers in enumerate(layers_of)
            for position, layer in enumerate(layers)
        }

    @property
    def is_remote(self) -> bool:
        return any(group.is_remote for group in self.groups)

    def plan(self, step: AttentionStep) -> GroupedPlan:
        return GroupedPlan([group.plan(step) for group in self.groups], self._positions)


class GroupedPlan:
    """Attention for one step's rows."""

    def __init__(
        self, groups: Sequence[Attention], positions: Mapping[int, tuple[int, int]]
    ) -> None:
        """groups: plans, one for each group or for some layers of one. positions: for each layer,
        its plan and its number in the group."""
        self._groups = groups
        self._positions = positions

    def begin(self, layer: int, q: Tensor) -> Ticket:
        group, position = self._positions[layer]
        return self._groups[group].begin(position, q)._replace(layer=layer)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        group, position = self._positions[ticket.layer]
        return self._groups[group].finish(ticket._replace(layer=position), k, v, rotation)


def group_layers(
    layers: Sequence[AttentionLayer], max_model_len: int
) -> list[tuple[int | None, list[int]]]:
    """Returns (window, layer numbers) of each group, the largest window first. A window of at least
    max_model_len counts as None, full attention. Layers with chunks are groups of their own, whose
    window is a chunk: no row sees more keys. A layer that shares the K/V of another is in its
    group."""
    found: dict[tuple[int, bool], list[int]] = {}
    for number in range(len(layers)):
        owner = layers[kv_owner(layers, number)]
        reach = owner.window if owner.chunk is None else owner.chunk
        window = max_model_len if reach is None else min(reach, max_model_len)
        has_chunks = owner.chunk is not None and window < max_model_len
        found.setdefault((window, has_chunks), []).append(number)
    order = sorted(found, reverse=True)
    return [(key[0] if key[0] < max_model_len else None, found[key]) for key in order]
