"""The ranks of one model: stages of layers, each divided among tensor ranks. Integers only.

Rank 0 is the engine: the first tensor rank of the last stage, which has the head. Ranks count the
tensor ranks of the last stage, then those of the stage before it, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank stands: its stage, counted from the embedding, and its rank in the stage."""

    stage: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Grid:
    """tensor: ranks of each stage. stages: the first layer of each stage and their number."""

    tensor: int
    stages: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return self.tensor * len(self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def place(self, rank: int) -> Place:
        before_last, tensor = divmod(rank, self.tensor)
        return Place(len(self.stages) - 1 - before_last, tensor)

    def rank(self, stage: int, tensor: int) -> int:
        return (len(self.stages) - 1 - stage) * self.tensor + tensor

    def stage_ranks(self, stage: int) -> list[int]:
        """Returns the ranks of a stage in the order of their tensor ranks."""
        return [self.rank(stage, tensor) for tensor in range(self.tensor)]

    def previous(self, rank: int) -> int | None:
        """Returns the rank that sends a rank its hidden states; None in the first stage."""
        stage, tensor = self.place(rank)
        return None if stage == 0 else self.rank(stage - 1, tensor)

    def to_json(self) -> dict[str, object]:
        return {"tensor": self.tensor, "stages": [list(stage) for stage in self.stages]}

    @classmethod
    def from_json(cls, content: dict[str, object]) -> Grid:
        """Parses a grid. Raises ValueError for anything else."""
        tensor, stages = content.get("tensor"), content.get("stages")
        if type(tensor) is not int or tensor < 1 or not isinstance(stages, list) or not stages:
            raise ValueError(f"{content!r} is no grid")
        return cls(tensor, tuple(_stage(stage) for stage in stages))


def _stage(content: object) -> tuple[int, int]:
    if not isinstance(content, Sequence) or len(content) != 2:
        raise ValueError(f"{content!r} is no stage")
    first, count = content
    if type(first) is not int or type(count) is not int or first < 0 or count < 1:
        raise ValueError(f"{content!r} is no stage")
    return first, count
