"""Samples the rows of drafts, and keeps what agrees.

A sequence with d draft tokens has d + 1 rows in a step. Row j is sampled as if the first j draft
tokens were its last ones, so it has the token that the sequence would get there. The tokens are
kept up to the first that differs from the draft, that one included: they are those of d + 1 steps
without a draft, at any temperature, since a draw depends only on logits, seed and position.
"""

from __future__ import annotations

import collections.abc as abc
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ops.cpu.sampling import SamplingInputs
from serve.scheduler.sequence import Sequence


class DraftMask(NamedTuple):
    """A mask of a draft row, as the sampler reads it."""

    bits: npt.NDArray[np.uint32]

    @property
    def address(self) -> int:
        return int(self.bits.ctypes.data)


class DraftedTokens:
    """Tokens of a sequence and of its draft, which may grow; the sampler reads the length and the
    end."""

    __slots__ = ("_draft", "_known")

    def __init__(self, known: list[int], draft: list[int]) -> None:
        self._known, self._draft = known, draft

    def __len__(self) -> int:
        return len(self._known) + len(self._draft)

    def __getitem__(self, at: slice) -> list[int]:
        start, size = at.start or 0, len(self._known)
        return [*self._known[start:], *self._draft[max(0, start - size) :]]


class DraftRow:
    """Takes the place of a sequence in the sampler, after the first num_drafted of its draft."""

    def __init__(self, sequence: Sequence, num_drafted: int) -> None:
        self.sequence = sequence
        self.request, self.seed = sequence.request, sequence.seed
        self.token_ids = DraftedTokens(sequence.token_ids, sequence.draft_ids[:num_drafted])
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.stop_ids, self.min_tokens_total = sequence.stop_ids, sequence.min_tokens_total
        self.mask = sequence.mask
        self.next_mask: DraftMask | None = None
        if self.mask is not None and self.mask.is_needed(len(self.token_ids)):
            bits = self.mask.draft_bits
            self.next_mask = DraftMask(bits[num_drafted - 1]) if num_drafted <= len(bits) else None

    @property
    def history(self) -> Any:
        return self.sequence.history

    @history.setter
    def history(self, inputs: object) -> None:
        self.sequence.history = inputs


def sampler_rows(sampled: abc.Sequence[Sequence]) -> list[Any]:
    """Returns what the sampler takes for rows in which a sequence with a draft repeats."""
    rows: list[Any] = []
    num_drafted = 0
    for i, sequence in enumerate(sampled):
        num_drafted = num_drafted + 1 if i and sampled[i - 1] is sequence else 0
        rows.append(DraftRow(sequence, num_drafted) if num_drafted else sequence)
    return rows


class Kept(NamedTuple):
    """The rows whose tokens are kept, and how many each sequence keeps, in order."""

    rows: list[int]
    counts: list[int]


def kept_rows(sampled: abc.Sequence[Sequence], tokens: abc.Sequence[int]) -> Kept:
    """Compares tokens[i], sampled in row i of sampled[i], with the drafts."""
    rows: list[int] = []
    counts: list[int] = []
    num_drafted, agrees = 0, False
    for i, (sequence, token) in enumerate(zip(sampled, tokens, strict=True)):
        if not i or sampled[i - 1] is not sequence:
            num_drafted, agrees = 0, True
            counts.append(0)
            if isinstance(sequence.history, SamplingInputs):
                sequence.history.forget_after(len(sequence.token_ids))
        if not agrees:
            continue
        rows.append(i)
        counts[-1] += 1
        draft = sequence.draft_ids
        agrees = num_drafted < len(draft) and draft[num_drafted] == token
        num_drafted += 1
        if agrees and sequence.mask is not None:
            is_masked = sequence.mask.is_needed(len(sequence.token_ids) + num_drafted)
            agrees = not is_masked or num_drafted <= len(sequence.mask.draft_bits)
    return Kept(rows, counts)
