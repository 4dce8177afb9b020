"""Reads the hidden states from which remaining lengths are predicted, as short sketches."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve.prediction.features import SKETCH_SIZE
from serve.prediction.regression import Floats
from serve.scheduler.sequence import Sequence

# An answer's state is read before its first token, after MIN_TOKENS more, and then whenever it has
# grown by a quarter: what is left of a long answer is known less precisely anyway.
MIN_TOKENS = 16
GROWTH = 1.25


class HiddenSketch(NamedTuple):
    """The sketch, [SKETCH_SIZE], of the row that gives output token number num_output."""

    sequence: Sequence
    num_output: int
    sketch: Floats


class HiddenReader:
    """Reads states from a step's sampled rows when they are due.

    A sketch adds up hidden_size / SKETCH_SIZE values of the normalised state with fixed signs, so
    it costs one product of the row, and no weights are kept but the signs.
    """

    def __init__(self, hidden_size: int) -> None:
        generator = torch.Generator().manual_seed(hidden_size)
        width = -(-hidden_size // SKETCH_SIZE)
        self._places = torch.randperm(hidden_size, generator=generator)
        self._padding = width * SKETCH_SIZE - hidden_size
        signs = torch.randint(0, 2, (hidden_size,), generator=generator) * 2 - 1
        self._signs = signs.float()
        self._scale = (SKETCH_SIZE / hidden_size) ** 0.5

    def read(self, hidden: Tensor, sampled: Rows[Sequence]) -> list[HiddenSketch]:
        """Returns the sketches that are due. hidden: [len(sampled), hidden], before the final norm;
        each sequence has the tokens before the one that its row gives."""
        due = [i for i, s in enumerate(sampled) if len(s.token_ids) >= s.state_due_at]
        if not due:
            return []
        rows = (hidden if len(due) == len(sampled) else hidden[due]).float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
        rows = (rows * self._signs)[:, self._places]
        rows = torch.nn.functional.pad(rows, (0, self._padding))
        sketches = rows.view(len(due), SKETCH_SIZE, -1).sum(-1).mul_(self._scale)
        values = sketches.numpy().astype(np.float64)
        found = []
        for row, index in enumerate(due):
            sequence = sampled[index]
            num_output = sequence.num_output_tokens
            after = max(num_output + MIN_TOKENS, int(num_output * GROWTH))
            sequence.state_due_at = sequence.num_prompt_tokens + after
            found.append(HiddenSketch(sequence, num_output, values[row]))
        return found
