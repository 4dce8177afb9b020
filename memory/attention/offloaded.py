"""The attention seam over int8 and int4 K/V in tiles of which a part is in memory, and the rest in
a file.

A layer's part of a tile is a unit, which is in memory or in the file. Each layer of a step makes
the units resident that its rows read and write, and starts to fetch those that the next layer will
probably read. Which tiles a decoded row reads follows from the bounds of the keys, which are always
in memory, so that a tile that is not selected is not fetched.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from memory.attention.early_choices import EarlyChoices
from memory.attention.offloaded_layout import OffloadedKVLayout
from memory.attention.recent_blocks import RecentBlocks, Span
from memory.attention.seam import (
    AttentionStep,
    ExpectsQueries,
    Finished,
    Rotation,
    Ticket,
)
from memory.attention.tiled import append, tiled_ops
from memory.pages.lost_kv import KVLostError
from memory.policies.selection import Selection
from ops.cpu.native_tiled_attention import TiledAttention, TiledAttentionStep
from quant.kv import TILE_TOKENS

Tiles = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NO_TILES: Tiles = np.empty(0, dtype=np.int64)
_NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)


class ResidentUnits(Protocol):
    """Which units are in memory. Tiles are those of the pool, by number, none of them twice."""

    @property
    def fetched_bytes(self) -> int:
        """What was read from the file so far."""

    def begin_layer(self, layer: int, read: Tiles, written: Tiles, fresh: Flags) -> None:
        """Makes the units of a layer resident and keeps them so until the next call of this or of
        `end`. fresh: which of the written ones have no content yet. Raises OSError."""

    def locate(self, layer: int, tiles: Tiles, places: Tiles) -> None:
        """Writes the addresses of units to `places`: good for those that stay."""

    def fetch_ahead(self, layer: int, tiles: Tiles) -> None:
        """Begins to read units that are probably needed soon. Does not wait."""

    def end(self) -> None:
        """Lets all units go."""


class PoolTiles(Protocol):
    def __call__(self, start_bytes: int, first_tile: int, count: int) -> Tiles:
        """Returns the pool's numbers of tiles of the range that begins at this byte of the
        reservation."""


class OffloadedAttention:
    """Implements PlannedAttention over K/V whose units are resident as far as they are read."""

    is_remote = False

    def __init__(
        self,
        layout: OffloadedKVLayout,
        bounds_address: int,
        units: ResidentUnits,
        pool_tiles: PoolTiles,
        selection: Selection | None = None,
        max_tiles: int = sys.maxsize,
        recent: RecentBlocks | None = None,
    ) -> None:
        """bounds_address: of the reservation of the bounds. selection: what decoded rows read.
        max_tiles: the most tiles of a layer that can be resident at once. recent: recent tokens of
        int4 K/V; they are always in memory."""
        assert selection is None or layout.has_bounds, "rows select by bounds"
        self._layout = layout
        self._bounds_address = bounds_address
        self._units, self._pool_tiles = units, pool_tiles
        self._selection = selection
        self._max_tiles = max_tiles
        self._recent = recent
        ops = tiled_ops(layout, None if recent is None else recent.layers)
        self._ops = [op for op in ops if isinstance(op, TiledAttention)]
        assert len(self._ops) == len(ops), "no latents"
        self._read: dict[int, list[Flags]] = {}  # by a range's start, in the last step, per layer
        self._early = EarlyChoices()

    def plan(self, step: AttentionStep) -> OffloadedPlan:
        """Raises KVLostError if the sequences cannot read all of their K/V at once; each alone
        can."""
        layout = self._layout
        tiles = _tiles_of(step, layout.tile_bytes, self._pool_tiles)
        if len(step.starts) > 1 and tiles.num_whole(self._selects(step)) > self._max_tiles:
            raise KVLostError(errno.ENOMEM, "K/V on disk: a layer of the step does not fit")
        num_selecting, budgets = [0] * len(step.starts), list[int]()
        if self._selection is not None and step.prompt_lens is not None:
            num_selecting, budgets = self._selection.plan(
                step.num_rows, step.kv_lens, step.prompt_lens, TILE_TOKENS, step.policies
            )
        spans = [] if self._recent is None else self._recent.begin(step)
        native = self._native(step, len(step.starts), num_selecting, budgets)
        foreseen = None
        rows = step.num_rows if any(num_selecting[: step.num_decodes]) else []
        if self._early.begin(rows, self._units.fetched_bytes):
            foreseen = native
            if step.num_decodes < len(step.starts):
                foreseen = self._native(step, step.num_decodes, num_selecting, budgets)
        guesses = [self._read.get(start) for start in step.starts]
        return OffloadedPlan(
            self, native, foreseen, tiles, step.num_rows, num_selecting, step.starts, guesses, spans
        )

    def _native(
        self, step: AttentionStep, count: int, num_selecting: Sequence[int], budgets: Sequence[int]
    ) -> TiledAttentionStep:
        """Returns the step of the first `count` sequences. budgets: of the rows that select."""
        layout = self._layout
        first_tiles = [start // TILE_TOKENS for start in step.starts[:count]]
        native = TiledAttentionStep(
            0,  # see OffloadedPlan: each tile has a place
            layout.tile_bytes,
            [tile * layout.tile_bytes for tile in first_tiles],
            step.num_rows[:count],
            step.kv_lens[:count],
        )
        if layout.has_bounds:
            starts = [tile * layout.bounds_tile_bytes for tile in first_tiles]
            native.add_bounds(self._bounds_address, layout.bounds_tile_bytes, starts)
        if self._recent is not None:
            self._recent.add_to(native, step.starts[:count])
        if budgets:
            chosen = num_selecting[:count]
            native.select(chosen, budgets[: sum(chosen)])
        return native

    def _selects(self, step: AttentionStep) -> list[bool]:
        """Returns which sequences have rows that select: those after a prompt."""
        if self._selection is None or step.prompt_lens is None:
            return [False] * len(step.starts)
        lengths = zip(step.kv_lens, step.prompt_lens, strict=True)
        return [kv_len > prompt_len for kv_len, prompt_len in lengths]

    # ---- for plans

    @property
    def ops(self) -> Sequence[TiledAttention]:
        return self._ops

    @property
    def units(self) -> ResidentUnits:
        return self._units

    @property
    def max_tiles(self) -> int:
        return self._max_tiles

    def end(self, spans: Sequence[Span]) -> None:
        """Lets all units go after the last layer of a step, and the memory of recent tokens that
        no later row reads. spans: of the step."""
        self._units.end()
        if self._recent is not None:
            self._recent.end(spans)

    def note_asked(self, layer: int, num_units: int) -> None:
        """Notes that so many units of a layer are read."""
        self._early.asked(num_units * self._layout.unit_bytes[layer])

    def note(self, start: int, layer: int, read: Flags) -> None:
        """Notes what was read of a range, for the guess of the next step."""
        known = self._read.setdefault(start, [_NO_FLAGS] * len(self._ops))
        known[layer] = read


@dataclass(frozen=True, slots=True)
class _StepTiles:
    """The tiles of a step's sequences, one sequence after the other. ends: where each ends.
    is_shared: whether one is there twice. written, fresh: as in ResidentUnits."""

    tiles: Tiles
    ends: Sequence[int]
    is_shared: bool
    written: Tiles
    fresh: Flags

    def numbers(self, chosen: Flags) -> Tiles:
        found = self.tiles[chosen]
        return np.unique(found) if self.is_shared else found

    def num_whole(self, selects: Sequence[bool]) -> int:
        """Returns how many tiles the sequences have that do not select."""
        counts = np.diff([0, *self.ends])
        return len(self.numbers(np.repeat(~np.array(selects), counts)))


def _tiles_of(step: AttentionStep, tile_bytes: int, pool_tiles: PoolTiles) -> _StepTiles:
    parts: list[Tiles] = []
    written: list[Tiles] = []
    fresh: list[Flags] = []
    for start, rows, kv_len in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
        count, first_row = -(-kv_len // TILE_TOKENS), kv_len - rows
        found = pool_tiles(start // TILE_TOKENS * tile_bytes, 0, count)
        first = first_row // TILE_TOKENS
        parts.append(found)
        written.append(found[first:])
        fresh.append(np.arange(first, count) * TILE_TOKENS >= first_row)
    tiles = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    is_shared = len(parts) > 1 and len(np.unique(tiles)) < len(tiles)
    return _StepTiles(tiles, ends, is_shared, np.concatenate(written), np.concatenate(fresh))


class OffloadedPlan(ExpectsQueries):
    """Attention for one step's rows."""

    def __init__(
        self,
        attention: OffloadedAttention,
        step: TiledAttentionStep,
        foreseen: TiledAttentionStep | None,
        tiles: _StepTiles,
        num_rows: Sequence[int],
        num_selecting: Sequence[int],
        starts: Sequence[int],
        guesses: Sequence[Sequence[Flags] | None],
        spans: Sequence[Span],
    ) -> None:
        """foreseen: the step's first sequences, whose tiles are chosen early; None: no rows of
        these select. num_rows: of each sequence; num_selecting: its last ones, which select.
        guesses: what each layer may read of the sequences, from the first tile on. spans: of recent
        tokens."""
        selects = [n > 0 for n in num_selecting]
        self._places: Tiles = np.zeros(len(tiles.tiles), dtype=np.int64)
        step.place_tiles(self._places)
        self._attention, self._step, self._tiles = attention, step, tiles
        self._foreseen, self._is_told = foreseen, False
        self._selects, self._starts, self._guesses = selects, starts, guesses
        self._spans = spans
        self._all = tiles.numbers(np.ones(len(tiles.tiles), dtype=np.bool_))
        self._chooses = any(selects)
        rows = zip(num_rows, num_selecting, strict=True)
        self._stores_first = any(count > 1 and selecting for count, selecting in rows)

    def num_expected(self) -> int:
        self._is_told = self._foreseen is not None
        return self._foreseen.num_rows if self._foreseen is not None else 0

    def expect(self, layer: int, q: Tensor) -> None:
        """Begins to fetch what these queries choose, in place of what was read in the last step."""
        assert self._foreseen is not None
        chosen: Flags = (
            self._attention.ops[layer].choose(self._foreseen, q.float()).numpy().astype(np.bool_)
        )
        guess = self._guess(layer)
        guess[: len(chosen)] = chosen
        self._attention.units.fetch_ahead(layer, self._tiles.numbers(guess))

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        assert k is not None, "each layer has its own K/V"
        layer, q, _ = ticket
        attend = self._attend_chosen if self._chooses else self._attend_all
        units = self._attention.units
        try:
            out = attend(layer, q.float(), lambda: self._append(layer, k, v, rotation))
        except OSError as error:
            units.end()
            raise KVLostError.of(error) from error
        except BaseException:
            units.end()
            raise
        self._end_layer(layer)
        return Finished(out.to(q.dtype))

    def store(self, layer: int, k: Tensor, v: Tensor | None, rotation: Rotation | None) -> None:
        """Stores k and v of a layer, without attention."""
        self._begin_layer(layer, _NO_TILES, self._tiles.fresh)
        self._append(layer, k, v, rotation)
        self._end_layer(layer)

    def _end_layer(self, layer: int) -> None:
        if layer + 1 == len(self._attention.ops):
            self._attention.end(self._spans)

    def _begin_layer(self, layer: int, read: Tiles, fresh: Flags) -> None:
        """Makes the units resident that the layer reads and writes, and notes where they are."""
        units = self._attention.units
        units.begin_layer(layer, read, self._tiles.written, fresh)
        units.locate(layer, self._tiles.tiles, self._places)

    def _append(self, layer: int, k: Tensor, v: Tensor | None, rotation: Rotation | None) -> None:
        append(self._attention.ops[layer], self._step, k, v, rotation)

    def _check_room(self, read: Tiles) -> None:
        """Raises OSError, before anything is fetched, if the sequences read more of the layer than
        can be resident: rows that select may choose nearly everything."""
        if len(self._starts) > 1 and len(read) > self._attention.max_tiles:
            raise OSError(errno.ENOMEM, "a layer of the step does not fit")

    def _attend_all(self, layer: int, q: Tensor, store: Callable[[], None]) -> Tensor:
        units, ops = self._attention.units, self._attention.ops
        self._check_room(self._all)
        self._begin_layer(layer, self._all, self._tiles.fresh)
        units.fetch_ahead((layer + 1) % len(ops), self._all)
        store()
        return ops[layer].attend(self._step, q)

    def _attend_chosen(self, layer: int, q: Tensor, store: Callable[[], None]) -> Tensor:
        """Attends where rows select. A row chooses among the tiles before its own, so that it can
        choose before k and v are stored, unless rows before it in the step complete tiles."""
        units, tiles, ops = self._attention.units, self._tiles, self._attention.ops
        if self._stores_first:
            self._begin_layer(layer, _NO_TILES, tiles.fresh)
            store()
        chosen: Flags = ops[layer].choose(self._step, q).numpy().astype(np.bool_)
        fresh = np.zeros_like(tiles.fresh) if self._stores_first else tiles.fresh
        read = tiles.numbers(chosen)
        self._check_room(read)
        self._begin_layer(layer, read, fresh)
        following = (layer + 1) % len(ops)
        if not self._is_told or following == 0:  # else `expect` fetches
            units.fetch_ahead(following, tiles.numbers(self._guess(following)))
        if not self._stores_first:
            store()
        out = ops[layer].attend_chosen(self._step, q)
        self._attention.note_asked(layer, len(read))
        first = 0
        for start, selects, end in zip(self._starts, self._selects, tiles.ends, strict=True):
            if selects:
                self._attention.note(start, layer, chosen[first:end])
            first = end
        return out

    def _guess(self, layer: int) -> Flags:
        """Returns what the layer probably reads: of sequences that select, what it read in the
        previous step."""
        found: Flags = np.zeros(len(self._tiles.tiles), dtype=np.bool_)
        first = 0
        for selects, known, end in zip(self._selects, self._guesses, self._tiles.ends, strict=True):
            if not selects:
                found[first:end] = True
            elif known is not None:
                read = known[layer][: end - first]
                found[first : first + len(read)] = read
            first = end
        return found
