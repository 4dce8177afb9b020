"""The seam for a model whose layers form several groups: each layer to its group's K/V."""

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
)


class GroupedAttention:
    """PlannedAttention on one for each group. Ranges begin at the same token in all of them."""

    def __init__(
        self, groups: Sequence[PlannedAttention], layers_of: Sequence[Sequence[int]]
    ) -> None:
        """layers_of: of each group, its layers' numbers in the model."""
        self._groups = list(groups)
        self._places = {
            layer: (group, place)
            for group, layers in enumerate(layers_of)
            for place, layer in enumerate(layers)
        }

    @property
    def is_remote(self) -> bool:
        return any(group.is_remote for group in self._groups)

    def plan(self, step: AttentionStep) -> GroupedPlan:
        return GroupedPlan([group.plan(step) for group in self._groups], self._places)


class GroupedPlan:
    """Attention for one step's rows."""

    def __init__(self, groups: Sequence[Attention], places: Mapping[int, tuple[int, int]]) -> None:
        """places: of each layer, its group and its number in there."""
        self._groups = groups
        self._places = places

    def begin(self, layer: int, q: Tensor) -> Ticket:
        group, place = self._places[layer]
        return Ticket(layer, self._groups[group].begin(place, q).q)

    def finish(self, ticket: Ticket, k: Tensor, v: Tensor, rotation: Rotation | None) -> Pending:
        group, place = self._places[ticket.layer]
        return self._groups[group].finish(Ticket(place, ticket.q), k, v, rotation)


def group_layers(
    layers: Sequence[AttentionLayer], max_model_len: int
) -> list[tuple[int | None, list[int]]]:
    """(window, numbers of its layers): those that see everything first, if there are any. A
    window that no sequence outgrows is none."""
    found: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        window = max_model_len if layer.window is None else min(layer.window, max_model_len)
        found.setdefault(window, []).append(number)
    order = sorted(found, reverse=True)
    return [(window if window < max_model_len else None, found[window]) for window in order]
