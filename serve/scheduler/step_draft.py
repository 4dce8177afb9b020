"""A step while its rows are given out. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from serve.scheduler.chunking import StepBudget
from serve.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """budget: the rows that are left for prompts. decodes: sequences with one row; chunks: with
    more, and how many."""

    budget: StepBudget
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]

    def add(self, sequence: Sequence, rows: int) -> None:
        """Its next rows."""
        self.budget.take(rows, sequence.num_computed_tokens)
        if rows == 1:
            self.decodes.append(sequence)
        elif rows:
            self.chunks.append((sequence, rows))

    def remove(self, sequence: Sequence) -> None:
        """Take back the rows that it was given."""
        context = sequence.num_computed_tokens
        given = [(i, rows) for i, (other, rows) in enumerate(self.chunks) if other is sequence]
        for i, rows in given:
            del self.chunks[i]
            self.budget.give_back(rows, context)
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget.give_back(1, context)
