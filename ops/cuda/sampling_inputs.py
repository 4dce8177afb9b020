"""Sampling parameters of a sequence on the device, packed once as a record of 64 bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# ops/triton_kernels/sampling.py names the words of a record
_RECORD = struct.Struct("=Qqdfffffiiiii")
RECORD_BYTES = _RECORD.size
# the fields that change from step to step
FIELDS = np.dtype(
    {
        "names": ["position", "slot", "counts_row", "first_edit", "num_edits"],
        "formats": [np.int64, np.int32, np.int32, np.int32, np.int32],
        "offsets": [8, 48, 52, 56, 60],
        "itemsize": RECORD_BYTES,
    }
)
NO_ROW = _RECORD.pack(0, 0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0, -1, -1, 0, 0)
MAX_TOP = 20
# Room for a row's biases and forbidden tokens: serve/sampling_params.py allows 1024 of each, and
# there are the model's own ends.
MAX_EDITS = 2048 + 64
_MASK64 = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1
_INT32s = npt.NDArray[np.int32]
Edits = tuple[_INT32s, npt.NDArray[np.float32]]


class DeviceSamplingInputs:
    """The sampling parameters of one sequence; the arguments are those of SamplingInputs."""

    def __init__(
        self,
        *,
        seed: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        num_prompt: int = 0,
        biases: Mapping[int, float] | None = None,
        forbidden: Collection[int] = (),
        num_logprobs: int | None = None,
    ) -> None:
        assert num_logprobs is None or 0 <= num_logprobs <= MAX_TOP, f"{num_logprobs=}"
        self.has_penalties = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        self.num_logprobs = num_logprobs
        self.num_prompt = num_prompt
        biases = biases or {}
        self.has_edits = bool(biases)
        self.is_plain = not (temperature or self.has_penalties or biases)
        # the row of token_counts, and the number of tokens there if steps follow one another
        self.counts_row, self.next_count = -1, -1
        self._edits = _edits(biases, ())
        self._held_edits = _edits(biases, forbidden)
        floor = math.log(np.float32(min_p)) if min_p > 0 else -math.inf
        top_k = min(max(top_k, 0), _MAX_INT32)
        numbers = (temperature, floor, repetition, presence, frequency, top_k)
        self.record = _RECORD.pack(seed & _MASK64, 0, top_p, *numbers, -1, -1, 0, 0)

    def edits(self, is_held: bool) -> Edits:
        """Returns (tokens, values added to their logits), each token once."""
        return self._held_edits if is_held else self._edits


def _edits(biases: Mapping[int, float], forbidden: Collection[int]) -> Edits:
    values = {**biases, **dict.fromkeys(forbidden, -math.inf)}
    return np.array(list(values), dtype=np.int32), np.array(list(values.values()), dtype=np.float32)


class Row(NamedTuple):
    """One row of a step.

    token_ids: prompt and output of its sequence; a negative last token is only known to the device,
    as last_tokens[slot]. is_held: exclude the forbidden tokens. mask: words with a bit for each
    allowed token, read when the plan is uploaded; None allows all.
    """

    choice: DeviceSamplingInputs
    slot: int
    token_ids: Sequence[int]
    is_held: bool = False
    mask: npt.NDArray[np.uint32] | None = None
