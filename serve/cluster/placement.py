"""Which machine holds which stage of a model. Integers and names only; Ray is not needed.

One bundle of a placement group is one stage: Ray keeps a bundle on one machine, so that the tensor
ranks of a stage, which exchange results several times a layer, share memory. The stages, which
exchange hidden states once a step, are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve.errors import ConfigError, MergestepError


class Node(NamedTuple):
    """A machine of the cluster, or one of several Ray nodes of a machine. cpus: free CPUs."""

    id: str
    address: str
    cpus: float

    @property
    def name(self) -> str:
        """Tells nodes of one address apart."""
        return f"{self.address} ({self.id[:6]})"


class Shape(NamedTuple):
    """The ranks of a model. tensor: ranks of a stage. cpus: CPUs of a rank."""

    tensor: int
    num_stages: int
    cpus: int

    @property
    def size(self) -> int:
        return self.tensor * self.num_stages

    @property
    def stage_cpus(self) -> int:
        return self.tensor * self.cpus

    def bundle(self, rank: int) -> int:
        """Returns the number of a rank's bundle. Bundle 0 is the last stage, which has rank 0."""
        return rank // self.tensor

    def place(self, rank: int) -> tuple[int, int]:
        """Returns a rank's stage, counted from the embedding, and its rank in the stage."""
        bundle, tensor = divmod(rank, self.tensor)
        return self.num_stages - 1 - bundle, tensor


def choose_cpus(nodes: Sequence[Node], tensor: int, num_stages: int) -> int:
    """Returns the most CPUs that every rank can have. ConfigError if none can be had."""
    most = int(max((node.cpus for node in nodes), default=0))
    for cpus in range(most // tensor, 0, -1):
        if sum(int(node.cpus // (cpus * tensor)) for node in nodes) >= num_stages:
            return cpus
    raise too_few(nodes, Shape(tensor, num_stages, 1))


def place_stages(nodes: Sequence[Node], shape: Shape) -> list[Node] | None:
    """Returns the node of each bundle as Ray's SPREAD strategy fills nodes: those that hold the
    fewest bundles first. None if there is too little room."""
    free = {node.id: node.cpus for node in nodes}
    held = dict.fromkeys(free, 0)
    placed: list[Node] = []
    for _ in range(shape.num_stages):
        fit = [node for node in nodes if free[node.id] >= shape.stage_cpus]
        if not fit:
            return None
        node = min(fit, key=lambda each: (held[each.id], -free[each.id]))
        free[node.id] -= shape.stage_cpus
        held[node.id] += 1
        placed.append(node)
    return placed


def too_few(nodes: Sequence[Node], shape: Shape) -> MergestepError:
    """Returns the error that says what is asked for and what there is."""
    there = ", ".join(f"{node.cpus:g} on {node.name}" for node in nodes) or "none"
    return ConfigError(
        f"cpus_per_rank {shape.cpus}: the cluster has too little room. Asked for:"
        f" {shape.stage_cpus} CPUs on one node for each of {shape.num_stages} stages, which have"
        f" {shape.tensor} tensor ranks; free: {there}"
    )


def placement_lines(shape: Shape, places: Sequence[Node], pids: Sequence[int] = ()) -> list[str]:
    """Returns a table of the ranks. places: the node of each rank, or of each bundle."""
    is_by_rank = len(places) == shape.size
    heads = ["rank", "stage", "tensor", "CPUs", "node", *(["process"] if pids else [])]
    rows = [heads]
    for rank in range(shape.size):
        stage, tensor = shape.place(rank)
        node = places[rank if is_by_rank else shape.bundle(rank)]
        row = [str(rank), str(stage), str(tensor), str(shape.cpus), node.name]
        rows.append([*row, *([str(pids[rank])] if pids else [])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
