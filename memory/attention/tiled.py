"""int8 and int4 K/V in tiles on the reservation, and the attention seam over it on the native
kernels.

A range is a row of tiles of 16 tokens, and a tile holds all layers, one after the other. A token's
tile is (range start + position) // 16, so a kernel needs a base, one stride and a length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.seam import (
    AttentionLayer,
    AttentionStep,
    Finished,
    Rotation,
    Ticket,
    kv_owner,
)
from memory.policies.selection import Selection
from ops.cpu.native_latent_attention import LatentAttention
from ops.cpu.native_tiled_attention import (
    Int4Attention,
    Int8Attention,
    TiledAttention,
    TiledAttentionStep,
)
from quant.kv import (
    GROUPS,
    TILE_TOKENS,
    Int4KVFormat,
    Int8KVFormat,
    LatentKVFormat,
    bounds_bytes,
    kv_format,
    latent_format,
)

TILED_TYPES = ("int8", "int4")
MAX_SCORES = 1 << 23
"""Of tiles and K/V heads that rows choose from in one call; each takes 8 bytes until the thread
ends, which are in no account of K/V: many rows of a long answer are computed again in parts."""
Format = Int8KVFormat | Int4KVFormat | LatentKVFormat


class TiledKVLayout:
    """The layout of all layers' K and V in one tile's bytes.

    A layer that shares the K/V of another has its offset. A late layer's int4 K/V is int8, because
    recent tokens are no more precise there. Where K/V is selected, the bounds of a tile's keys
    (ops/csrc/kv_bounds.inl) follow the K/V of each layer whose rows see all keys.
    """

    tile_tokens = TILE_TOKENS

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        kv_dtype: str,
        group: int,
        *,
        has_bounds: bool = False,
    ) -> None:
        """kv_dtype: one of TILED_TYPES. group: the scale group along head_dim; a smaller one is
        used if it does not divide it. has_bounds: whether K/V is selected."""
        self.layers = list(layers)
        # in bytes, per layer, from the start of a tile; None: the layer has none
        self.bounds: list[int | None] = []
        self.formats: list[Format] = []
        self.offsets: list[int] = []  # in bytes, per layer, from the start of a tile
        offset = 0
        for number, layer in enumerate(self.layers):
            form = _format(layer, kv_dtype, group)
            assert form is not None, f"no {kv_dtype} K/V for {layer}"
            self.formats.append(form)
            owner = kv_owner(self.layers, number)
            self.offsets.append(offset if owner == number else self.offsets[owner])
            bounds = self.offsets[-1] + form.tile_bytes
            is_selected = has_bounds and is_selectable(layer) and is_selectable(self.layers[owner])
            self.bounds.append(bounds if is_selected else None)
            if owner == number:
                offset = bounds
                if is_selected:
                    offset += bounds_bytes(layer.num_kv_heads, layer.head_dim)
        self.tile_bytes = offset

    def pad(self, tile_bytes: int) -> None:
        """Pads each tile to tile_bytes, so that a page holds a whole number of tiles."""
        assert tile_bytes >= self.tile_bytes and tile_bytes % TILE_TOKENS == 0, f"{tile_bytes=}"
        self.tile_bytes = tile_bytes

    @property
    def token_bytes(self) -> int:
        return self.tile_bytes // TILE_TOKENS

    @property
    def has_bounds(self) -> bool:
        return any(offset is not None for offset in self.bounds)

    @staticmethod
    def supports(layers: Sequence[AttentionLayer], kv_dtype: str) -> bool:
        return all(_format(layer, kv_dtype, GROUPS[0]) is not None for layer in layers)


def is_selectable(layer: AttentionLayer) -> bool:
    """Returns whether decoded rows of a layer may read a part of its K/V: those of latents, and of
    layers that see the newest keys alone, read everything."""
    is_whole = layer.window is None and layer.chunk is None
    return is_whole and layer.value_dim is None and not layer.is_late


def _format(layer: AttentionLayer, kv_dtype: str, group: int) -> Format | None:
    if layer.is_late:
        kv_dtype = "int8"
    if layer.value_dim is None:
        return kv_format(kv_dtype, layer.num_kv_heads, layer.head_dim, group)
    has_options = layer.window is not None or layer.soft_cap or layer.sinks is not None
    if kv_dtype != "int8" or has_options or layer.num_kv_heads != 1:
        return None
    return latent_format(layer.value_dim, layer.head_dim, group)


TiledOp = TiledAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class RecentStore:
    """The int8 K/V of all layers but late ones at `address`, from which rows read the keys of their
    own block (quant/kv.py: RECENT_BLOCK); int4 K/V has the earlier ones. Ranges begin at the same
    token in both."""

    layout: TiledKVLayout
    address: int

    def of(self, numbers: Sequence[int]) -> RecentLayers:
        """Returns the store of the layers with these numbers."""
        return RecentLayers(self, [self.place(number) for number in numbers])

    def place(self, number: int) -> tuple[int, int] | None:
        """Returns a layer's offset in a tile, in bytes, and its group; None for a late layer, which
        is the last one."""
        if number == len(self.layout.layers):
            return None
        return self.layout.offsets[number], self.layout.formats[number].group


@dataclass(frozen=True, slots=True)
class RecentLayers:
    """The recent store of some layers. places: the offset and the group of each that has a part in
    it."""

    store: RecentStore
    places: Sequence[tuple[int, int] | None]

    def add_to(self, native: TiledAttentionStep, step: AttentionStep) -> None:
        """Adds the store to a planned step."""
        layout, address = self.store.layout, self.store.address
        starts = [start * layout.token_bytes for start in step.starts]
        native.add_recent(address, layout.tile_bytes, starts)


def tiled_ops(layout: TiledKVLayout, recent: RecentLayers | None = None) -> list[TiledOp]:
    """Returns the kernels' parameters of each layer of a layout. recent: the layers' store of
    recent tokens."""
    places = [None] * len(layout.layers) if recent is None else recent.places
    parts = zip(layout.layers, layout.formats, layout.offsets, places, layout.bounds, strict=True)
    return [_op(*part) for part in parts]


def _op(
    layer: AttentionLayer,
    form: Format,
    offset_bytes: int,
    recent: tuple[int, int] | None,
    bounds_offset: int | None,
) -> TiledOp:
    if isinstance(form, LatentKVFormat):
        return LatentAttention(
            offset_bytes=offset_bytes,
            num_heads=layer.num_heads,
            value_dim=form.value_dim,
            rope_dim=form.rope_dim,
            group=form.group,
            rope_group=form.rope_group,
            scale=layer.scale,
        )
    make = Int4Attention if isinstance(form, Int4KVFormat) else Int8Attention
    return make(
        offset_bytes=offset_bytes,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        group=form.group,
        scale=layer.scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks or (),
        recent=recent,
        bounds_offset=bounds_offset,
    )


class TiledLocalAttention:
    """Implements PlannedAttention over K/V in tiles at `address`."""

    is_remote = False

    def __init__(
        self,
        layout: TiledKVLayout,
        address: int,
        is_eager: bool = False,
        recent: RecentLayers | None = None,
        selection: Selection | None = None,
    ) -> None:
        """is_eager: `begin` attends over earlier keys, because k and v come later. recent: the
        layers' store of recent tokens, only without is_eager. selection: what decoded rows read in
        layers with bounds."""
        assert recent is None or not is_eager, "a recent store is read in one call"
        self._selection = selection if layout.has_bounds else None
        self._layout = layout
        self._is_eager = is_eager
        self._address = address
        self._recent = recent
        self._ops = tiled_ops(layout, recent)
        layers = zip(layout.layers, layout.bounds, strict=True)
        of_selected = [layer.num_kv_heads for layer, bounds in layers if bounds is not None]
        self._most_heads = max(of_selected, default=1)

    def plan(self, step: AttentionStep) -> TiledLocalPlan:
        native_step = self._native(step)
        parts: list[RowsOfStep] = []
        if self._selection is not None and step.prompt_lens is not None:
            counts, budgets = self._selection.plan(
                step.num_rows, step.kv_lens, step.prompt_lens, TILE_TOKENS, step.policies
            )
            native_step.select(counts, budgets)
            parts = self._parts(step, counts, budgets)
        return TiledLocalPlan(self._layout, self._ops, native_step, self._is_eager, parts)

    def _native(self, step: AttentionStep) -> TiledAttentionStep:
        token_bytes = self._layout.token_bytes
        native_step = TiledAttentionStep(
            self._address,
            self._layout.tile_bytes,
            [start * token_bytes for start in step.starts],
            step.num_rows,
            step.kv_lens,
        )
        if self._recent is not None:
            self._recent.add_to(native_step, step)
        return native_step

    def _parts(
        self, step: AttentionStep, counts: Sequence[int], budgets: Sequence[int]
    ) -> list[RowsOfStep]:
        """Returns the parts of a step whose rows score more than MAX_SCORES tiles; none of a
        smaller one."""
        lens = [length // TILE_TOKENS + 1 for length in step.kv_lens]
        most = MAX_SCORES // self._most_heads
        if sum(counts) * max(lens, default=0) <= most:
            return []
        parts, row, at = [], 0, 0
        for runs in _runs_of(step.num_rows, counts, lens, most):
            rows = [n for _, n, _, _ in runs]
            part = AttentionStep(
                0,
                [step.starts[i] for i, *_ in runs],
                rows,
                [step.kv_lens[i] - left for i, _, _, left in runs],
            )
            native_step = self._native(part)
            chosen = [n for _, _, n, _ in runs]
            native_step.select(chosen, budgets[at : at + sum(chosen)])
            parts.append(RowsOfStep(slice(row, row + sum(rows)), native_step))
            row, at = row + sum(rows), at + sum(chosen)
        return parts


class RowsOfStep(NamedTuple):
    """Some rows of a step, in order, and the step of these alone."""

    rows: slice
    step: TiledAttentionStep


def _runs_of(
    num_rows: Sequence[int], counts: Sequence[int], num_tiles: Sequence[int], most: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Divides the rows of a step, the last counts[i] of sequence i of which score num_tiles[i]
    tiles each, into parts that score at most `most`, or have one such row. Yields each part's runs:
    the sequence, its rows, how many of them score, and how many rows of the sequence follow."""
    runs: list[tuple[int, int, int, int]] = []
    free = most
    for i, (left, tiles) in enumerate(zip(num_rows, num_tiles, strict=True)):
        while left:
            whole = max(0, left - counts[i])
            fitting = max(0 if runs else 1, free // tiles)
            taken = min(left, whole + fitting)
            if taken:
                scoring = taken - min(whole, taken)
                left -= taken
                runs.append((i, taken, scoring, left))
                free = max(0, free - scoring * tiles)
            if left:
                yield runs
                runs, free = [], most
    yield runs


class TiledLocalPlan:
    """Attention for one step's rows."""

    def __init__(
        self,
        layout: TiledKVLayout,
        ops: Sequence[TiledOp],
        step: TiledAttentionStep,
        is_eager: bool,
        parts: Sequence[RowsOfStep] = (),
    ) -> None:
        """parts: of the step, which layers with bounds attend to one after the other; none: they
        attend to all rows at once."""
        self._layout = layout
        self._ops = ops
        self._step = step
        self._is_eager = is_eager and step.num_single_rows > 0
        self._parts = parts

    def begin(self, layer: int, q: Tensor) -> Ticket:
        begun = None
        if self._is_eager:
            selects = self._layout.bounds[layer] is not None
            if not selects or (self._step.can_begin and not self._parts):
                begun = self._ops[layer].begin(self._step, q.float())
        return Ticket(layer, q, begun)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        layer, q, begun = ticket
        op = self._ops[layer]
        if k is not None:
            self.store(layer, k, v, rotation)
        if self._parts and self._layout.bounds[layer] is not None:
            x = q.float()
            found = [op.attend(part, x[rows]) for rows, part in self._parts]
            return Finished(torch.cat(found).to(q.dtype))
        return Finished(op.attend(self._step, q.float(), begun=begun).to(q.dtype))

    def store(self, layer: int, k: Tensor, v: Tensor | None, rotation: Rotation | None) -> None:
        """Stores k and v of a layer, without attention."""
        append(self._ops[layer], self._step, k, v, rotation)


def append(
    op: TiledOp, step: TiledAttentionStep, k: Tensor, v: Tensor | None, rotation: Rotation | None
) -> None:
    """Stores k and v of a layer; v is None where V is a part of K."""
    if isinstance(op, LatentAttention):
        op.append(step, k.float(), v, rotation)
    else:
        assert v is not None, "a layer with V"
        op.append(step, k.float(), v.float(), rotation)
