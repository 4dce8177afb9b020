"""Attention on a CUDA device over K/V tiles, a whole step in a few launches.

`StepArrays` holds the metadata of a step in device memory at fixed addresses, and grids depend on
padded sizes only, so that `CudaAttentionLayer`'s launches can be captured in a CUDA graph. Nothing
here knows sequences as objects, pages or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.kv_tiles import TILE_TOKENS, KVTiles, layer_bytes
from ops.triton_kernels import latent
from ops.triton_kernels.decode import combine, decode
from ops.triton_kernels.kv import Rotation, append
from ops.triton_kernels.prefill import prefill, tile_rows

__all__ = [
    "CudaAttentionLayer",
    "HeadShape",
    "KVTiles",
    "PrefillChunk",
    "Rotation",
    "StepArrays",
    "layer_bytes",
]

Integers = NDArray[np.int64]
MIN_SPLIT = 256
MAX_SPLITS = 32
_PROGRAMS_PER_SM = 3


class PrefillChunk(NamedTuple):
    """A prefill chunk of a step.

    start: token number of its sequence's position 0; first_row: its first row in the step; kv_len:
    K/V length with these rows.
    """

    start: int
    first_row: int
    num_rows: int
    kv_len: int


class PromptAttention(Protocol):
    """A library's kernel for long prefill chunks (ops/cuda/prefill.py)."""

    def attend(
        self, tiles: KVTiles, base: int, prompt: PrefillChunk, q: Tensor, out: Tensor
    ) -> None:
        """Computes attention of a chunk's rows of q: [T, H, D] into the same rows of out."""


class HeadShape(NamedTuple):
    """The heads of a layer. is_latent: it keeps one vector for K and V (ops.cuda.latent)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_latent: bool = False

    @property
    def tile_rows(self) -> int:
        if self.is_latent:
            return latent.tile_rows(self.num_heads)
        return tile_rows(self.num_heads // self.num_kv_heads, self.head_dim)


class StepArrays:
    """Metadata of one step: a host layout, its copy on the device, and scratch for splits.

    A host buffer is an int32 tensor of `num_words`, pinned if there is a GPU; callers may alternate
    several. shapes: those of the layers; the tiles of prefill chunks are listed once for each
    number of rows in a tile. windows: those of the layers, None for all keys; each has its own work
    list. The rows of a step are one per decoding sequence, then the prefill chunks, then padding up
    to padded_rows. padded_decodes: decode rows of the launches. Those beyond the real ones write
    zeros, before the rows of prefill chunks are written there.
    """

    def __init__(
        self,
        max_rows: int,
        max_seqs: int,
        max_len: int,
        shapes: Sequence[HeadShape],
        device: torch.device | str,
        windows: Sequence[int | None] = (None,),
        min_split: int = MIN_SPLIT,
    ) -> None:
        assert len(set(windows)) == len(windows) > 0 < len(shapes), f"{windows} {shapes}"
        assert min_split % TILE_TOKENS == 0, f"{min_split=}"
        self.max_rows, self.max_seqs, self.max_len = max_rows, max_seqs, max_len
        self.rows_per_tile = tuple(dict.fromkeys(shape.tile_rows for shape in shapes))
        self.windows, self.min_split = tuple(windows), min_split
        # A window may begin and end inside a split, which adds an item per sequence.
        self.max_items = max_seqs * min(MAX_SPLITS, -(-max_len // min_split)) + max_seqs
        max_tiles = [max_rows // rows + min(max_seqs, max_rows) for rows in self.rows_per_tile]
        num_counts = len(windows) + len(max_tiles)
        sizes = {"counts": num_counts, "rows": 2 * max_rows, "starts": 2 * max_seqs}
        sizes |= {"prompt_starts": 2 * max_seqs, "prompts": 4 * max_seqs}
        sizes |= {f"slots{i}": 2 * max_seqs for i in range(len(windows))}
        sizes |= {f"tiles{i}": 2 * count for i, count in enumerate(max_tiles)}
        sizes |= {f"items{i}": 4 * self.max_items for i in range(len(windows))}
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = (at, size)
            at += -(-size // 4) * 4
        self.num_words = at
        self.buffer = torch.zeros(at, dtype=torch.int32, device=device)
        self.rows = self._wide("rows")
        self.starts, self.prompt_starts = self._wide("starts"), self._wide("prompt_starts")
        self.prompts = self._part("prompts").view(-1, 4)
        self.tiles = [self._part(f"tiles{i}").view(-1, 2) for i in range(len(max_tiles))]
        counts = self._part("counts")
        self.num_items = [counts[i : i + 1] for i in range(len(windows))]
        self.num_tiles = [counts[i : i + 1] for i in range(len(windows), num_counts)]
        self.slots = [self._part(f"slots{i}").view(-1, 2) for i in range(len(windows))]
        self.items = [self._part(f"items{i}").view(-1, 4) for i in range(len(windows))]
        # The layers use this memory in turn, each with its own heads.
        most = self.max_items * max(shape.num_heads * shape.head_dim for shape in shapes)
        self._outs = torch.empty(most, dtype=torch.float32, device=device)
        most = self.max_items * max(shape.num_heads for shape in shapes)
        self._lses = torch.empty(most, dtype=torch.float32, device=device)
        self.num_programs = _num_programs(self.buffer)

    def fill(
        self,
        host: Tensor,
        starts: Sequence[int],
        num_rows: Sequence[int],
        kv_lens: Sequence[int],
        num_decodes: int,
        padded_rows: int,
        padded_decodes: int,
        library_rows: int | None = None,
    ) -> list[PrefillChunk]:
        """Writes a step into a host buffer. ValueError names the limit that is exceeded.

        starts, num_rows, kv_lens: for each sequence the token number of its position 0, its rows
        in this step, and its K/V length with these rows. Returns the chunks of library_rows or
        more rows, which are `attend`'s prompts.
        """
        assert len(host) == self.num_words and host.dtype == torch.int32, f"{host.shape}"
        start, count, length = (np.asarray(x, np.int64) for x in (starts, num_rows, kv_lens))
        self._check(start, count, length, num_decodes, padded_rows, padded_decodes)
        words = host.numpy()
        of_prompts = slice(num_decodes, len(start))
        rows = self._host(words, "rows")[: 2 * padded_rows].view(np.int64)
        rows[:num_decodes] = start[:num_decodes] + length[:num_decodes] - 1
        rows[num_decodes:] = -1
        chunks = self._fill_rows(
            rows, start[of_prompts], count[of_prompts], length[of_prompts], num_decodes
        )
        is_own = [library_rows is None or x.num_rows < library_rows for x in chunks]
        own = [x for x, kept in zip(chunks, is_own, strict=True) if kept]
        self._fill_prompts(words, np.asarray(own, np.int64).reshape(-1, 4))
        self._host(words, "starts").view(np.int64)[:num_decodes] = start[:num_decodes]
        counts = self._host(words, "counts")
        for i, window in enumerate(self.windows):
            slots = self._host(words, f"slots{i}").reshape(-1, 2)
            slots[num_decodes:] = 0
            items = self._host(words, f"items{i}").reshape(-1, 4)
            counts[i] = self.fill_items(slots, items, length[:num_decodes], window)
        return [x for x, kept in zip(chunks, is_own, strict=True) if not kept]

    def upload(self, host: Tensor) -> None:
        """Copies a filled host buffer to the device, in stream order.

        The host buffer is in use until the copy has run on the stream.
        """
        counts = self._host(host.numpy(), "counts")
        for i in range(len(self.windows)):
            at, _ = self._places[f"items{i}"]
            first, end = at if i else 0, at + 4 * int(counts[i])
            self.buffer[first:end].copy_(host[first:end], non_blocking=True)

    def tile_index(self, rows: int) -> int:
        return self.rows_per_tile.index(rows)

    def scratch(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Returns memory for results of splits: outs [items, H, D] and lses [items, H] fp32."""
        lses = self._lses[: self.max_items * num_heads].view(-1, num_heads)
        outs = self._outs[: self.max_items * num_heads * head_dim]
        return outs.view(-1, num_heads, head_dim), lses

    def window_index(self, window: int | None) -> int:
        return self.windows.index(window)

    def _fill_rows(
        self, rows: Integers, start: Integers, count: Integers, length: Integers, first_row: int
    ) -> list[PrefillChunk]:
        ends = np.cumsum(count)
        firsts = ends - count
        if len(start):
            each = np.repeat(start + length - count - firsts, count)
            rows[first_row : first_row + ends[-1]] = each + np.arange(ends[-1])
        table = np.stack((start, firsts + first_row, count, length), 1)
        return [PrefillChunk(*row) for row in table.tolist()]

    def _fill_prompts(self, words: NDArray[np.int32], chunks: Integers) -> None:
        start, first, count, length = chunks.T
        self._host(words, "prompt_starts").view(np.int64)[: len(start)] = start
        prompts = self._host(words, "prompts").reshape(-1, 4)[: len(start)]
        prompts[:, 0], prompts[:, 1], prompts[:, 2] = first, count, length
        counts = self._host(words, "counts")[len(self.windows) :]
        for i, rows in enumerate(self.rows_per_tile):
            num_tiles = -(-count // rows)
            total = int(num_tiles.sum())
            sequence = np.repeat(np.arange(len(start)), num_tiles)
            index = np.arange(total) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
            # The longest first, so that all programs end at about the same time.
            keys = (length - count)[sequence] + index * rows
            order = np.argsort(-keys, kind="stable")
            tiles = self._host(words, f"tiles{i}").reshape(-1, 2)[:total]
            tiles[:, 0], tiles[:, 1] = sequence[order], index[order] * rows
            counts[i] = total

    def fill_items(
        self,
        slots: NDArray[np.int32],
        items: NDArray[np.int32],
        length: Integers,
        window: int | None,
    ) -> int:
        """Writes the splits of rows that read so many keys, some perhaps none, and where the result
        of each goes. Returns their number."""
        first = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
        size = self._split_sizes(length - first)
        begin = first // size
        count = -(-length // size) - begin
        slot = np.cumsum(count) - count
        slots[: len(length), 0], slots[: len(length), 1] = slot, count
        total = int(count.sum())
        row = np.repeat(np.arange(len(length)), count)
        number = np.arange(total)
        at = (number - slot[row] + begin[row]) * size[row]
        item = items[:total]
        item[:, 0] = row
        item[:, 1] = np.maximum(at, first[row])
        item[:, 2] = np.minimum(at + size[row], length[row])
        item[:, 3] = number
        return total

    def _split_sizes(self, seen: Integers) -> Integers:
        """Returns the keys per split, which depend only on the row's number of keys."""
        limits = self.min_split * MAX_SPLITS << np.arange(40)
        return self.min_split << np.searchsorted(limits, seen)

    def _check(
        self,
        start: Integers,
        count: Integers,
        length: Integers,
        num_decodes: int,
        padded_rows: int,
        padded_decodes: int,
    ) -> None:
        assert len(start) == len(count) == len(length) >= num_decodes, f"{len(start)}"
        assert (count > 0).all() and (count[:num_decodes] == 1).all(), f"{count}"
        assert (length >= count).all() and (start >= 0).all(), f"{length}"
        assert not (start % TILE_TOKENS).any(), f"{start}"
        needed = max(padded_decodes, int(count.sum()))
        assert num_decodes <= padded_decodes and needed <= padded_rows, f"{padded_rows=} {needed=}"
        longest = int(length.max(initial=0))
        limits = [("max_rows", padded_rows, self.max_rows)]
        limits += [("max_seqs", max(len(start), padded_decodes), self.max_seqs)]
        limits += [("max_len", longest, self.max_len)]
        for name, wanted, most in limits:
            if wanted > most:
                raise ValueError(f"a step needs {name} {wanted}; the limit is {most}")

    def _host(self, words: NDArray[np.int32], name: str) -> NDArray[np.int32]:
        at, size = self._places[name]
        return words[at : at + size]

    def _part(self, name: str) -> Tensor:
        at, size = self._places[name]
        return self.buffer[at : at + size]

    def _wide(self, name: str) -> Tensor:
        return self._part(name).view(torch.int64)


class CudaAttentionLayer:
    """One layer's K/V in the tiles at base. Rows are in the order of StepArrays."""

    def __init__(
        self,
        tiles: KVTiles,
        base: int,
        library: PromptAttention | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """sinks: [H] fp32 on the device, logits that take part in the softmax and have no value."""
        self.tiles, self.base, self.library, self.sinks = tiles, base, library, sinks
        shape = HeadShape(tiles.num_heads, tiles.num_kv_heads, tiles.head_dim)
        self.rows_per_tile = shape.tile_rows

    def append(
        self, arrays: StepArrays, k: Tensor, v: Tensor, rotation: Rotation | None = None
    ) -> None:
        """Stores k, v: [T, Hk, D] of all rows; a rotation, [T, R/2] each, is applied to k first."""
        append(self.tiles, self.base, k, v, arrays.rows, rotation)

    def attend(
        self,
        arrays: StepArrays,
        q: Tensor,
        num_decodes_padded: int,
        num_rows_padded: int,
        has_prefill: bool,
        prompts: Sequence[PrefillChunk] = (),
        lse: Tensor | None = None,
    ) -> Tensor:
        """Returns attention [T, H, D] for q: [T, H, D]; padding rows are undefined.

        K/V of all rows must be appended. prompts: the chunks that `fill` returned, only outside of
        CUDA graphs. lse: [T, H] fp32, gets the log-sum-exps; then the result is fp32 and there are
        no such chunks.
        """
        assert lse is None or not prompts, "libraries return no log-sum-exps"
        tiles = self.tiles
        dtype = q.dtype if lse is None else torch.float32
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        if num_decodes_padded:
            of_rows = None if lse is None else lse[:num_decodes_padded]
            decoded = out[:num_decodes_padded]
            self._attend_decodes(arrays, q[:num_decodes_padded], decoded, of_rows)
        if has_prefill:
            kind = arrays.tile_index(self.rows_per_tile)
            max_tiles = num_rows_padded // self.rows_per_tile
            max_tiles += min(num_rows_padded, arrays.max_seqs)
            prefill(
                q,
                tiles,
                self.base,
                arrays.prompt_starts,
                arrays.prompts,
                arrays.tiles[kind],
                arrays.num_tiles[kind],
                max_tiles,
                self.rows_per_tile,
                out,
                lse,
                sinks=self.sinks,
            )
        for prompt in prompts:
            assert self.library is not None
            self.library.attend(tiles, self.base, prompt, q, out)
        return out

    def _attend_decodes(
        self, arrays: StepArrays, q: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Computes the decode rows q into out and lse."""
        tiles, index = self.tiles, arrays.window_index(self.tiles.window)
        outs, lses = arrays.scratch(tiles.num_heads, tiles.head_dim)
        decode(
            q,
            tiles,
            self.base,
            arrays.starts,
            arrays.items[index],
            arrays.num_items[index],
            outs,
            lses,
            arrays.num_programs,
        )
        combine(outs, lses, arrays.slots[index], out, lse, sinks=self.sinks)


def _num_programs(buffer: Tensor) -> int:
    """Returns the number of programs of the decode kernel, which take items until none is left."""
    if not buffer.is_cuda:
        return 2
    properties: Any = torch.cuda.get_device_properties(buffer.device)
    return int(properties.multi_processor_count) * _PROGRAMS_PER_SM
