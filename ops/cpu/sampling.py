"""Native sampling of tokens from rows of logits (ops/csrc/sampling.inl).

SamplingInputs holds the parameters that stay the same for a sequence, packed once, so that a step
costs about a microsecond of Python per row. The caller handles the case that the kernels are not
built.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu import native_library

# kernels.h: struct SamplingInputs and struct SampledRow
_DRAW = struct.Struct("=QQdQQQQQfffffiiiiii4x")
MAX_TOP = 20
SAMPLED_ROW = np.dtype(
    [
        ("token", np.int32),
        ("rank", np.int32),
        ("num_top", np.int32),
        ("logprob", np.float32),
        ("top_tokens", np.int32, MAX_TOP),
        ("top_logprobs", np.float32, MAX_TOP),
    ]
)
_MASK64 = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1

SampledRows = npt.NDArray[np.void]
"""A structured array with a SAMPLED_ROW per row; ranks count from 1."""


def is_available() -> bool:
    return native_library.is_available()


def takes(logits: Tensor) -> bool:
    """Returns whether the kernels support logits: fp32 on the CPU with dense rows."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1


class TokenHistory:
    """An array that follows a growing list of tokens; a step copies only the new tokens."""

    def __init__(self) -> None:
        self._buffer = np.empty(64, dtype=np.int64)
        self._length = 0
        self.address = self._buffer.ctypes.data

    def tokens(self, token_ids: Sequence[int]) -> Tensor:
        """Returns token_ids as int64 [n]. token_ids extends the list of the previous call."""
        self.follow(token_ids)
        return torch.from_numpy(self._buffer[: self._length])

    def forget_after(self, num_tokens: int) -> None:
        """Forgets tokens that the list does not begin with any more."""
        self._length = min(self._length, num_tokens)

    def follow(self, token_ids: Sequence[int]) -> int:
        """Copies the new tokens to the array at `address`; returns the number of tokens."""
        length = len(token_ids)
        if length > len(self._buffer):
            larger = np.empty(2 * length, dtype=np.int64)
            larger[: self._length] = self._buffer[: self._length]
            self._buffer, self.address = larger, larger.ctypes.data
        if length > self._length:
            self._buffer[self._length : length] = token_ids[self._length :]
            self._length = length
        return length


class SamplingInputs:
    """The sampling parameters of one sequence.

    temperature 0 takes the largest logit; top_k <= 0 keeps all tokens. num_logprobs: number of
    alternatives to report, None for no log-probabilities. forbidden: tokens without probability in
    the steps packed with is_held.
    """

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
        assert temperature >= 0, f"{temperature=}"
        self.has_penalties = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        self.has_logprobs = num_logprobs is not None
        self.is_plain = temperature == 0 and not self.has_penalties and not biases
        self.is_plain = self.is_plain and not self.has_logprobs
        self.history = TokenHistory() if self.has_penalties else None
        # the packed addresses point into these
        self._bias_tokens = np.array(list(biases or ()), dtype=np.int32)
        self._biases = np.array(list((biases or {}).values()), dtype=np.float32)
        self._forbidden = np.array(sorted(forbidden), dtype=np.int32)
        self._seed = seed & _MASK64
        self._top_p = top_p
        self._addresses = tuple(
            array.ctypes.data for array in (self._bias_tokens, self._biases, self._forbidden)
        )
        logged = -1 if num_logprobs is None else num_logprobs
        top_k = min(max(top_k, 0), _MAX_INT32)
        self._numbers = (temperature, min_p, repetition, presence, frequency, top_k, logged)
        self._num_prompt = num_prompt

    def forget_after(self, num_tokens: int) -> None:
        """Forgets tokens after the first num_tokens, which were packed but are not the text's."""
        if self.history is not None:
            self.history.forget_after(num_tokens)

    def pack(
        self, to: bytearray, row: int, token_ids: Sequence[int], is_held: bool, mask: int = 0
    ) -> None:
        """Packs the inputs of a row. token_ids: prompt and output so far.

        is_held: exclude the forbidden tokens. mask: address of uint32 words with a bit for each
        allowed token; 0 allows all.
        """
        num_tokens = address = 0
        if self.history is not None:
            num_tokens, address = self.history.follow(token_ids), self.history.address
        _DRAW.pack_into(
            to,
            row * _DRAW.size,
            self._seed,
            len(token_ids),
            self._top_p,
            address,
            *self._addresses,
            mask,
            *self._numbers,
            num_tokens,
            self._num_prompt,
            len(self._biases),
            len(self._forbidden) if is_held else 0,
        )


def packed_rows(num_rows: int) -> bytearray:
    """Returns a buffer for num_rows rows, to be filled by SamplingInputs.pack."""
    return bytearray(num_rows * _DRAW.size)


def argmax(logits: Tensor) -> list[int]:
    """Returns the first token with the largest logit of each row of logits: [R, V]."""
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    chosen: list[int] = []
    if rows:
        chosen = native_library.library().argmax(logits.data_ptr(), logits.stride(0), rows, size)
    return chosen


def sample(logits: Tensor, packed: bytearray) -> SampledRows:
    """Samples a token per row of logits: [R, V], which are adjusted in place.

    packed: a buffer of packed_rows(R). IndexError for a token id beyond V.
    """
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    assert len(packed) == rows * _DRAW.size, f"{len(packed)} bytes for {rows} rows"
    out = np.zeros(rows, dtype=SAMPLED_ROW)
    if rows:
        library = native_library.library()
        assert (_DRAW.size, SAMPLED_ROW.itemsize) == (library.DRAW_BYTES, library.DRAWN_BYTES)
        plan = np.frombuffer(packed, dtype=np.uint8)
        stride, to = logits.stride(0), out.ctypes.data
        if not library.sample(logits.data_ptr(), stride, rows, size, plan.ctypes.data, to):
            raise IndexError(f"a token id is beyond the vocabulary of {size}")
    return out


def describe(logits: Tensor, tokens: npt.NDArray[np.int32], num_top: int) -> SampledRows:
    """Returns log-probability and rank of tokens[i] in row i of logits: [R, V].

    The num_top most likely tokens of the row come with it. IndexError for a token id beyond V.
    """
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    assert tokens.shape == (rows,) and tokens.dtype == np.int32, f"{tokens.shape}"
    assert 0 <= num_top <= MAX_TOP, f"{num_top=}"
    tokens = np.ascontiguousarray(tokens)
    out = np.zeros(rows, dtype=SAMPLED_ROW)
    if rows:
        library = native_library.library()
        assert SAMPLED_ROW.itemsize == library.DRAWN_BYTES
        given, to = tokens.ctypes.data, out.ctypes.data
        stride = logits.stride(0)
        if not library.describe_tokens(logits.data_ptr(), stride, rows, size, given, num_top, to):
            raise IndexError(f"a token id is beyond the vocabulary of {size}")
    return out
