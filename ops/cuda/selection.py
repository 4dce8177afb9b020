"""Decode attention over a part of each row's tiles on a CUDA device.

`SelectionArrays` is beside StepArrays: which decode rows of a step read everything and which read
a part, at fixed addresses. The former are left to the ordinary kernel and have its bits. The host
knows how many keys each of the latter reads, and splits them as those of a sequence of that length;
the device chooses which. All rows of a step are in one launch of each kernel, so rows of one
sequence are, too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.cuda.attention import CudaAttentionLayer, PromptAttention, Rotation, StepArrays
from ops.kv_tiles import TILE_TOKENS, KVTiles
from ops.triton_kernels.decode import combine, decode
from ops.triton_kernels.selection.bounds import bound_keys
from ops.triton_kernels.selection.choice import MAX_TILES, choose_tiles
from ops.triton_kernels.selection.scores import score_tiles

MAX_TOKENS = MAX_TILES * TILE_TOKENS
"""Of a sequence whose rows select."""
_COUNTS = 12  # rows that choose, items of rows that read everything, items of others
_COUNT_WORDS = 4  # of each, as kernels are compiled for addresses that are multiples of 16 bytes


class SelectionArrays:
    """Metadata of the decode rows of one step: a host layout and its copy on the device.

    choices: [(row, tiles with bounds, tiles to choose from them, 0)] int32, of the rows that read a
    part; slots and items as in StepArrays, whose scratch for results they use.
    """

    def __init__(self, steps: StepArrays, num_kv_heads: int) -> None:
        """num_kv_heads: the most of a layer."""
        assert steps.max_len <= MAX_TOKENS, f"{steps.max_len} tokens"
        max_tiles = -(-steps.max_len // TILE_TOKENS)
        self.steps, self._max_tiles = steps, max_tiles
        sizes = {"counts": _COUNTS, "slots": 2 * steps.max_seqs, "choices": 4 * steps.max_seqs}
        sizes |= {"whole": 4 * steps.max_items, "part": 4 * steps.max_items}
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = (at, at + size)
            at += -(-size // 4) * 4
        self.num_words = at
        device = steps.buffer.device
        self.buffer = torch.zeros(at, dtype=torch.int32, device=device)
        counts = self._part("counts")
        self.num_choices, self.num_whole, self.num_part = (
            counts[i : i + 1] for i in range(0, _COUNTS, _COUNT_WORDS)
        )
        self.slots = self._part("slots").view(-1, 2)
        self.choices = self._part("choices").view(-1, 4)
        self.whole, self.part = (self._part(name).view(-1, 4) for name in ("whole", "part"))
        # The layers use this memory in turn, for orders and then for tables of tiles.
        most = steps.max_seqs * num_kv_heads * max_tiles
        self._tables = torch.empty(most, dtype=torch.int32, device=device)

    def tables(self, num_kv_heads: int) -> Tensor:
        """Returns memory for the tiles of all rows, [rows, Hk, tiles] int32."""
        size = self.steps.max_seqs * num_kv_heads * self._max_tiles
        return self._tables[:size].view(-1, num_kv_heads, self._max_tiles)

    def fill(self, host: Tensor, length: NDArray[np.int64], budget: NDArray[np.int64]) -> None:
        """Writes the decode rows of a step into a host buffer. length: the keys that each could
        read; budget: the tiles that it reads, at least 1 with its own; 0: all."""
        assert len(host) == self.num_words and len(length) == len(budget), f"{host.shape}"
        words = host.numpy()
        held = -(-length // TILE_TOKENS)
        chooses = (budget > 0) & (budget < held)
        some = np.where(chooses, (budget - 1) * TILE_TOKENS + (length - 1) % TILE_TOKENS + 1, 0)
        slots = self._host(words, "slots").reshape(-1, 2)
        slots[:] = 0
        of_part = np.zeros_like(slots)
        whole, part = (self._host(words, name).reshape(-1, 4) for name in ("whole", "part"))
        num_whole = self.steps.fill_items(slots, whole, np.where(chooses, 0, length), None)
        num_part = self.steps.fill_items(of_part, part, some, None)
        part[:num_part, 3] += num_whole
        rows = np.flatnonzero(chooses)
        slots[rows, 0], slots[rows, 1] = of_part[rows, 0] + num_whole, of_part[rows, 1]
        choices = self._host(words, "choices").reshape(-1, 4)[: len(rows)]
        choices[:, 0], choices[:, 1], choices[:, 2] = rows, held[rows] - 1, budget[rows] - 1
        choices[:, 3] = 0
        self._host(words, "counts")[::_COUNT_WORDS] = len(rows), num_whole, num_part

    def upload(self, host: Tensor) -> None:
        """Copies a filled host buffer to the device, in stream order."""
        _, *counts = self._host(host.numpy(), "counts")[::_COUNT_WORDS].tolist()
        for name, count in zip(("whole", "part"), counts, strict=True):
            at, _ = self._places[name]
            first, end = 0 if name == "whole" else at, at + 4 * count
            self.buffer[first:end].copy_(host[first:end], non_blocking=True)

    def _host(self, words: NDArray[np.int32], name: str) -> NDArray[np.int32]:
        first, end = self._places[name]
        return words[first:end]

    def _part(self, name: str) -> Tensor:
        first, end = self._places[name]
        return self.buffer[first:end]


class SelectingLayer(CudaAttentionLayer):
    """One layer whose decode rows read a part of their tiles. The bounds of a tile's keys follow
    the layer's part of it."""

    def __init__(
        self,
        tiles: KVTiles,
        base: int,
        selection: SelectionArrays,
        library: PromptAttention | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(tiles, base, library, sinks)
        assert tiles.window is None, "a window's rows read all of it"
        self.selection = selection

    def append(
        self, arrays: StepArrays, k: Tensor, v: Tensor, rotation: Rotation | None = None
    ) -> None:
        super().append(arrays, k, v, rotation)
        bound_keys(self.tiles, self.base, arrays.rows, len(k))

    def _attend_decodes(
        self, arrays: StepArrays, q: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        selection, tiles = self.selection, self.tiles
        assert selection.steps is arrays, "the selection of another step"
        tables = selection.tables(tiles.num_kv_heads)
        of_choices = selection.choices, selection.num_choices, tables
        score_tiles(q, tiles, self.base, arrays.starts, *of_choices, arrays.num_programs)
        choose_tiles(*of_choices, len(q))
        outs, lses = arrays.scratch(tiles.num_heads, tiles.head_dim)
        every = selection.whole, selection.num_whole, None
        chosen = selection.part, selection.num_part, tables
        for items, count, of_rows in (every, chosen):
            decode(
                q, tiles, self.base, arrays.starts, items, count, outs, lses,
                arrays.num_programs, of_rows,
            )  # fmt: skip
        combine(outs, lses, selection.slots, out, lse, sinks=self.sinks)
