"""Native token choice over rows of logits (ops/csrc/sampling.inl): checks, packs, passes addresses.

SamplingInputs hold what stays the same for a sequence, packed once, so that a step costs about a
microsecond of Python for each row. Whoever calls decides what happens where nothing was built.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu import native

# kernels.h: struct Draw and struct Drawn
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
"""Structured: token, rank (from 1), num_top, logprob, top_tokens, top_logprobs, one per row."""


def is_available() -> bool:
    return native.is_available()


def takes(logits: Tensor) -> bool:
    """Whether the kernels read such a tensor: fp32 on the CPU, each row dense."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1


class TokenHistory:
    """A list of tokens as an array that grows with it, so that a step copies only new ones."""

    def __init__(self) -> None:
        self._buffer = np.empty(64, dtype=np.int64)
        self._length = 0
        self.address = self._buffer.ctypes.data

    def tokens(self, token_ids: Sequence[int]) -> Tensor:
        """token_ids: the list as it was the last time, and what came after. [its length] int64."""
        self.follow(token_ids)
        return torch.from_numpy(self._buffer[: self._length])

    def follow(self, token_ids: Sequence[int]) -> int:
        """After it the tokens are at address. Returns how many there are."""
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
    """How the tokens of one sequence are chosen. temperature 0: the largest logit; top_k <= 0: all.

    num_logprobs: alternatives to describe, None for no description. forbidden: tokens that
    get no probability in the steps that say so.
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

    def pack(
        self, to: bytearray, row: int, token_ids: Sequence[int], is_held: bool, mask: int = 0
    ) -> None:
        """Write row's plan. token_ids: prompt and output so far; is_held: forbid the forbidden.
        mask: address of uint32 words with a bit for each token that may come; 0: all may."""
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
    """Room for the plans of that many rows, to be packed one by one."""
    return bytearray(num_rows * _DRAW.size)


def argmax(logits: Tensor) -> list[int]:
    """logits: [R, V] -> the first of the largest of each row."""
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    chosen: list[int] = []
    if rows:
        chosen = native.library().argmax(logits.data_ptr(), logits.stride(0), rows, size)
    return chosen


def sample(logits: Tensor, packed: bytearray) -> SampledRows:
    """logits: [R, V], adjusted in place; packed: R plans. IndexError for a token beyond V."""
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    assert len(packed) == rows * _DRAW.size, f"{len(packed)} bytes for {rows} rows"
    out = np.zeros(rows, dtype=SAMPLED_ROW)
    if rows:
        library = native.library()
        assert (_DRAW.size, SAMPLED_ROW.itemsize) == (library.DRAW_BYTES, library.DRAWN_BYTES)
        plan = np.frombuffer(packed, dtype=np.uint8)
        stride, to = logits.stride(0), out.ctypes.data
        if not library.sample(logits.data_ptr(), stride, rows, size, plan.ctypes.data, to):
            raise IndexError(f"a token id is beyond the vocabulary of {size}")
    return out


def describe(logits: Tensor, tokens: npt.NDArray[np.int32], num_top: int) -> SampledRows:
    """logits: [R, V]; row i is described with tokens[i], with the num_top most likely beside it.
    IndexError for a token beyond V."""
    assert takes(logits), f"{logits.dtype} {logits.stride()}"
    rows, size = logits.shape
    assert tokens.shape == (rows,) and tokens.dtype == np.int32, f"{tokens.shape}"
    assert 0 <= num_top <= MAX_TOP, f"{num_top=}"
    tokens = np.ascontiguousarray(tokens)
    out = np.zeros(rows, dtype=SAMPLED_ROW)
    if rows:
        library = native.library()
        assert SAMPLED_ROW.itemsize == library.DRAWN_BYTES
        given, to = tokens.ctypes.data, out.ctypes.data
        stride = logits.stride(0)
        if not library.describe_tokens(logits.data_ptr(), stride, rows, size, given, num_top, to):
            raise IndexError(f"a token id is beyond the vocabulary of {size}")
    return out
