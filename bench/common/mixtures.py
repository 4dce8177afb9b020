"""How many experts of a mixture the rows of a step draw."""

from __future__ import annotations

from typing import NamedTuple


class MixtureSize(NamedTuple):
    """The sizes of one layer's mixture. parameters: weights of one expert's products."""

    num_experts: int
    top_k: int
    parameters: int

    def drawn(self, rows: float) -> float:
        """Returns the expected number of different experts that rows draw evenly; a row draws top_k
        different ones."""
        missed = pow(1 - self.top_k / self.num_experts, rows)
        return self.num_experts * (1.0 - float(missed))
