"""The attention seam over K/V in tiles in a CUDA device's memory, on the kernels of ops.

A range is a row of tiles of 16 tokens, and a tile holds all layers of a group, one after the other
(ops.kv_tiles). One device buffer with fixed offsets describes a step's rows, so that a captured
CUDA graph can be launched again for other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from memory.attention.seam import (
    AttentionLayer,
    AttentionStep,
    Finished,
    Rotation,
    Ticket,
    kv_owner,
)
from memory.attention.tiled import is_selectable
from memory.policies.selection import Selection
from ops.backend import Partial
from ops.cuda import attention as kernels
from ops.cuda.latent import CudaLatentLayer, LatentTiles
from ops.cuda.prefill import LibraryPrefill
from ops.cuda.selection import SelectingLayer, SelectionArrays
from ops.kv_tiles import TILE_TOKENS, KVTiles, key_bounds_bytes, layer_bytes
from quant.kv import MAX_LATENT_DIM, fitting_group, latent_format

_DIM_UNIT = 16  # of a head, as the kernels have it
CudaLayer = kernels.CudaAttentionLayer | CudaLatentLayer


class CudaKVLayout:
    """The layout of all layers' K and V in one tile's bytes. Head dimensions are padded with zeros
    to a multiple of 16, those of latents are not. A layer that shares the K/V of another has its
    offset. Where K/V is selected, the bounds of a tile's keys (ops.kv_tiles) follow the K/V of each
    layer whose rows see all keys."""

    tile_tokens = TILE_TOKENS

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        group: int,
        *,
        has_bounds: bool = False,
    ) -> None:
        """dtype: int8, bfloat16 or float32. group: the most values of a head that share a scale in
        int8. has_bounds: whether K/V is selected. Raises ValueError for heads that the kernels do
        not support."""
        self.layers = list(layers)
        self.dtype = dtype
        self.bounds: list[bool] = []  # per layer, whether it has bounds
        self.groups: list[int | None] = []
        self.offsets: list[int] = []  # in bytes, per layer, from the start of a tile
        offset = 0
        for number, layer in enumerate(self.layers):
            dim = padded_dim(layer.head_dim)
            is_int8 = dtype == torch.int8 and layer.value_dim is None
            self.groups.append(fitting_group(dim, group) if is_int8 else None)
            owner = kv_owner(self.layers, number)
            self.offsets.append(offset if owner == number else self.offsets[owner])
            is_selected = is_selectable(layer) and is_selectable(self.layers[owner])
            self.bounds.append(has_bounds and is_selected)
            if owner != number:
                continue
            if self.bounds[number]:
                offset += key_bounds_bytes(layer.num_kv_heads, dim)
            if layer.value_dim is None:
                offset += layer_bytes(layer.num_kv_heads, dim, dtype, self.groups[number])
            else:
                offset += latent_tiles(layer, dtype, group).layer_bytes
        self.tile_bytes = offset
        self._group = group

    def pad(self, tile_bytes: int) -> None:
        """Pads each tile to tile_bytes, so that a page holds a whole number of tiles."""
        assert tile_bytes >= self.tile_bytes and tile_bytes % TILE_TOKENS == 0, f"{tile_bytes=}"
        self.tile_bytes = tile_bytes

    @property
    def token_bytes(self) -> int:
        return self.tile_bytes // TILE_TOKENS

    def tiles(self, index: int) -> KVTiles | LatentTiles:
        """Returns the kernels' parameters of a layer."""
        layer = self.layers[index]
        if layer.value_dim is not None:
            place = self.tile_bytes, self.offsets[index]
            return latent_tiles(layer, self.dtype, self._group, place)
        return KVTiles(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=padded_dim(layer.head_dim),
            scale=layer.scale,
            window=layer.window,
            dtype=self.dtype,
            group=self.groups[index],
            tile_stride=self.tile_bytes,
            offset=self.offsets[index],
            soft_cap=layer.soft_cap,
        )


def latent_tiles(
    layer: AttentionLayer, dtype: torch.dtype, group: int, place: tuple[int, int] | None = None
) -> LatentTiles:
    """Returns the kernels' parameters of a layer that keeps latents. place: bytes from tile to
    tile, and to the layer's part of one. ValueError for layers that the kernels do not support."""
    value_dim = layer.value_dim
    groups: tuple[int | None, int | None] = (None, None)
    assert value_dim is not None
    if layer.num_kv_heads != 1 or layer.window is not None or layer.soft_cap or layer.sinks:
        raise ValueError("latents with windows, a soft cap, sinks or several heads")
    if not 0 < value_dim < layer.head_dim <= MAX_LATENT_DIM:
        raise ValueError(f"latents of {value_dim} values and {layer.head_dim} with their rest")
    if dtype == torch.int8:
        form = latent_format(value_dim, layer.head_dim, group)
        if form is None:
            raise ValueError(f"int8 latents of {value_dim} and {layer.head_dim} values")
        groups = form.group, form.rope_group
    stride, offset = place or (1 << 30, 0)
    rope_dim = layer.head_dim - value_dim
    sizes = layer.num_heads, value_dim, rope_dim, layer.scale, dtype
    return LatentTiles(*sizes, *groups, stride, offset)


def padded_dim(head_dim: int) -> int:
    return -(-head_dim // _DIM_UNIT) * _DIM_UNIT


def step_arrays(
    layers: Sequence[AttentionLayer],
    *,
    max_rows: int,
    max_seqs: int,
    max_len: int,
    device: torch.device,
) -> kernels.StepArrays:
    """Returns the step buffers for a model's layers."""
    shapes = [
        kernels.HeadShape(
            x.num_heads, x.num_kv_heads, padded_dim(x.head_dim), x.value_dim is not None
        )
        for x in layers
    ]
    windows = list(dict.fromkeys(layer.window for layer in layers))
    return kernels.StepArrays(max_rows, max_seqs, max_len, shapes, device, windows)


class SelectedRows(NamedTuple):
    """What decode rows read, and the buffers for the next step's."""

    selection: Selection
    arrays: SelectionArrays

    def fill(self, host: Tensor, step: AttentionStep) -> None:
        """Writes the decode rows of a step to host memory. Rows of chunks read everything."""
        n = step.num_decodes
        budgets = np.zeros(n, np.int64)
        if step.prompt_lens is not None:
            each = step.num_rows[:n], step.kv_lens[:n], step.prompt_lens[:n]
            policies = None if step.policies is None else step.policies[:n]
            counts, chosen = self.selection.plan(*each, TILE_TOKENS, policies)
            budgets[np.asarray(counts, bool)] = chosen
        self.arrays.fill(host, np.asarray(step.kv_lens[:n], np.int64), budgets)


def selected_rows(
    selection: Selection | None, layouts: Sequence[CudaKVLayout], arrays: kernels.StepArrays
) -> SelectedRows | None:
    """Returns the buffers of rows that select in the layers with bounds; None if none does."""
    heads = [
        layer.num_kv_heads
        for layout in layouts
        for layer, has_bounds in zip(layout.layers, layout.bounds, strict=True)
        if has_bounds
    ]
    if selection is None or not heads:
        return None
    return SelectedRows(selection, SelectionArrays(arrays, max(heads)))


class CudaAttention:
    """Implements PlannedAttention over the K/V of one or several layer groups.

    arrays: the buffers of the next step; they hold one step at a time, in the order of the device's
    work.
    """

    is_remote = False

    def __init__(
        self,
        layouts: Sequence[CudaKVLayout],
        layers_of: Sequence[Sequence[int]],
        bases: Sequence[int],
        arrays: kernels.StepArrays,
        library: LibraryPrefill | None = None,
        selected: SelectedRows | None = None,
    ) -> None:
        """layers_of: for each layout, the numbers of its layers in the model. bases: for each
        layout, the address where its ranges begin. library: computes long chunks outside CUDA
        graphs. selected: what decode rows read in layers with bounds; None: everything."""
        self.arrays = arrays
        self._library_rows = None if library is None else library.min_rows
        self._selected = selected
        self._host = torch.zeros(self.num_words, dtype=torch.int32)
        made = {
            number: _made_layer(layout, place, base, library, arrays, selected)
            for layout, ids, base in zip(layouts, layers_of, bases, strict=True)
            for place, number in enumerate(ids)
        }
        self._layers = [made[number] for number in range(len(made))]

    @property
    def num_words(self) -> int:
        """The int32 words of a host buffer for `fill`: those of the step, and then those of rows
        that select."""
        selected = 0 if self._selected is None else self._selected.arrays.num_words
        return self.arrays.num_words + selected

    def upload(self, host: Tensor) -> None:
        """Copies a filled host buffer to the device, in the order of its work."""
        if self._selected is not None:
            self._selected.arrays.upload(host[self.arrays.num_words :])
        self.arrays.upload(host)

    def plan(self, step: AttentionStep) -> CudaPlan:
        """Plans exactly these rows and uploads them. The device has finished the previous step."""
        num_rows, num_decodes = sum(step.num_rows), step.num_decodes
        chunks = self.fill(self._host, step, num_rows, num_decodes, is_captured=False)
        self.upload(self._host)
        return self.view(num_rows, num_decodes, len(step.num_rows) > num_decodes, chunks)

    def fill(
        self,
        host: Tensor,
        step: AttentionStep,
        num_rows: int,
        num_decodes: int,
        *,
        is_captured: bool,
    ) -> Sequence[kernels.PrefillChunk]:
        """Writes a step, padded to these numbers, to host memory for `arrays.upload`. Returns the
        chunks that the library computes, for `view`; a captured step has none."""
        chunks = self.arrays.fill(
            host[: self.arrays.num_words],
            step.starts,
            step.num_rows,
            step.kv_lens,
            step.num_decodes,
            num_rows,
            num_decodes,
            None if is_captured else self._library_rows,
        )
        if self._selected is not None:
            self._selected.fill(host[self.arrays.num_words :], step)
        return chunks

    def view(
        self,
        num_rows: int,
        num_decodes: int,
        has_prompts: bool,
        chunks: Sequence[kernels.PrefillChunk] = (),
    ) -> CudaPlan:
        """Returns the plan for steps of at most num_rows rows, num_decodes of them decode rows. The
        device reads the rows from the arrays when it runs the plan."""
        return CudaPlan(self._layers, self.arrays, num_rows, num_decodes, has_prompts, chunks)


def _made_layer(
    layout: CudaKVLayout,
    place: int,
    base: int,
    library: LibraryPrefill | None,
    arrays: kernels.StepArrays,
    selected: SelectedRows | None,
) -> CudaLayer:
    tiles = layout.tiles(place)
    if isinstance(tiles, LatentTiles):
        assert library is None, "libraries do not attend to latents"
        return CudaLatentLayer(tiles, base)
    sinks = _sinks(layout.layers[place], arrays)
    if selected is not None and layout.bounds[place]:
        return SelectingLayer(tiles, base, selected.arrays, library, sinks)
    return kernels.CudaAttentionLayer(tiles, base, library, sinks)


def _sinks(layer: AttentionLayer, arrays: kernels.StepArrays) -> Tensor | None:
    if layer.sinks is None:
        return None
    return torch.tensor(layer.sinks, dtype=torch.float32, device=arrays.buffer.device)


class CudaPlan:
    """Attention for one step's rows."""

    def __init__(
        self,
        layers: Sequence[CudaLayer],
        arrays: kernels.StepArrays,
        num_rows: int,
        num_decodes: int,
        has_prompts: bool,
        chunks: Sequence[kernels.PrefillChunk],
    ) -> None:
        self._layers, self._arrays = layers, arrays
        self._sizes = num_decodes, num_rows, has_prompts, chunks

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        number, q, _ = ticket
        self._append(number, k, v, rotation)
        out = self._layers[number].attend(self._arrays, self._padded(number, q), *self._sizes)
        return Finished(self._unpadded(number, q, out))

    def partial(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Partial:
        """Writes k, which is rotated, and v, and returns fp32 attention with its log-sum-exps. The
        plan has no chunks for a library."""
        self._append(layer, k, v, None)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        padded = self._padded(layer, q)
        out = self._layers[layer].attend(self._arrays, padded, *self._sizes, lse=lse)
        return Partial(self._unpadded(layer, q, out), lse)

    def _append(
        self, number: int, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> None:
        layer = self._layers[number]
        turn = None if rotation is None else kernels.Rotation(*rotation)
        if isinstance(layer, CudaLatentLayer):
            if k is not None:
                layer.append(self._arrays, k, turn)
        elif k is not None and v is not None:
            k, v = self._padded(number, k), self._padded(number, v)
            layer.append(self._arrays, k, v, turn)

    def _padded(self, number: int, x: Tensor) -> Tensor:
        missing = self._layers[number].tiles.head_dim - x.shape[2]
        return pad(x, (0, missing)) if missing else x

    def _unpadded(self, number: int, q: Tensor, out: Tensor) -> Tensor:
        """Returns the result without the padding of q's heads."""
        dim = q.shape[2]
        return out if self._layers[number].tiles.head_dim == dim else out[..., :dim]
