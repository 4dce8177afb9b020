"""Attention over int8 and int4 K/V on the native kernels (ops/csrc/attention*.inl)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu.native_library import BEGIN, FINISH, address, library
from ops.cpu.native_rotation import check_rotation
from ops.cpu.native_tile_lists import TileList, TileShares


class TiledAttentionStep:
    """The sequences of one step over int8 or int4 K/V, shared by all layers."""

    def __init__(
        self,
        address: int,
        tile_bytes: int,
        starts: Sequence[int],
        num_rows: Sequence[int],
        kv_lens: Sequence[int],
        *,
        prefix_only: bool = False,
    ) -> None:
        """starts: byte offset of each range from address; num_rows, kv_lens: as in the seam.

        With prefix_only, kv_lens (perhaps 0) count the keys before the step. The rows attend to
        these keys only, and append writes after them.
        """
        assert len(starts) == len(num_rows) == len(kv_lens), "one of each for every sequence"
        counts = zip(num_rows, kv_lens, strict=True)
        assert all(n > 0 and length >= (0 if prefix_only else n) for n, length in counts)
        self._counts = num_rows
        self.num_rows = sum(num_rows)
        self.num_single_rows = sum([n == 1 for n in num_rows])
        self.plan: Any = library().StepPlan(
            address, tile_bytes, starts, num_rows, kv_lens, prefix_only
        )
        self._is_prefix_only = prefix_only
        self._selects = False

    def add_recent(self, address: int, tile_bytes: int, starts: Sequence[int]) -> None:
        """Adds the int8 store of the rows' own blocks, as for the other store. Layers that have a
        part there write k and v to both, and rows read the keys of their own block from it."""
        assert not self._is_prefix_only, "the rows of a prefix_only step have no own keys"
        self.plan.add_recent(address, tile_bytes, starts)

    def add_bounds(self, address: int, tile_bytes: int, starts: Sequence[int]) -> None:
        """Adds the store of the bounds of the keys, as for K/V: layers with bounds write and read
        them there, and the offset of their bounds counts from the start of its tiles."""
        assert len(starts) == len(self._counts), "one range for each sequence"
        self.plan.add_bounds(address, tile_bytes, starts)

    def place_tiles(self, places: npt.NDArray[np.int64]) -> None:
        """Makes each tile of K/V lie at its address in `places`, the tiles of the sequences one
        after the other. Each call reads the addresses anew, so that they may change between
        layers. Other stores stay where they are."""
        assert not self._is_prefix_only, "rows are appended behind the tiles of a prefix"
        assert places.dtype == np.int64 and places.flags.c_contiguous
        assert len(places) == self.plan.num_tiles, "a place for each tile"
        self._places = places  # the plan reads it
        self.plan.place_tiles(places.ctypes.data)

    def select(self, num_selecting: Sequence[int], budgets: Sequence[int]) -> None:
        """Makes the last num_selecting[i] rows of sequence i read a part of their tiles in layers
        with bounds. budgets: for each of these rows the number of tiles, its own included, which
        is read in any case; a row with a recent store also reads its whole block.

        Rows of a prefix_only step choose among the complete tiles of the prefix and read what
        follows these in any case. Their budgets are those for all keys: tiles from the end of the
        complete ones to that of the row's own position are taken from them."""
        rows = zip(num_selecting, self._counts, strict=True)
        assert all(0 <= n <= count for n, count in rows), f"{num_selecting=} of {self._counts}"
        assert len(budgets) == sum(num_selecting), "a budget for each row that selects"
        assert all(n > 0 for n in budgets), f"{budgets=}"
        self._selects = bool(budgets)
        self.plan.select(list(num_selecting), list(budgets))

    @property
    def can_begin(self) -> bool:
        """Whether `TiledAttention.begin` can attend in layers with bounds: tiles are complete and
        have bounds before k and v of single rows, but not before those of several."""
        return not self._selects or self.num_single_rows == self.num_rows


class TiledAttention:
    """One layer over K/V in tiles. append rotates, quantizes and stores; attend computes attention.

    window: keys a row sees, itself included; soft_cap: cap * tanh(score / cap); slopes: ALiBi, one
    per head; sinks: a logit per head that is added to the denominator only. A prefix_only step
    leaves sinks out, because they belong to the part with the row's own key. recent: the offset in
    bytes and the group of the layer in the int8 store of steps that have one (quant/kv.py:
    RECENT_BLOCK). bounds_offset: where the bounds of the layer's keys begin in a tile, which append
    writes and rows that `select` use: in a tile of the store of bounds of a step that has one, in
    one of K/V otherwise; None: none, as with a window or slopes.
    """

    bits: int
    min_group: int

    def __init__(
        self,
        *,
        offset_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: int,
        scale: float,
        window: int | None = None,
        soft_cap: float = 0.0,
        slopes: Sequence[float] = (),
        sinks: Sequence[float] = (),
        recent: tuple[int, int] | None = None,
        bounds_offset: int | None = None,
    ) -> None:
        assert head_dim % 16 == 0 and head_dim <= library().MAX_HEAD_DIM, f"{head_dim=}"
        assert group >= self.min_group and (group == 8 or group % 16 == 0), f"{group=}"
        assert head_dim % group == 0, f"{head_dim=} {group=}"
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        assert len(slopes) in (0, num_heads) and len(sinks) in (0, num_heads), "one for each head"
        has_bounds, sees_all = bounds_offset is not None, window is None and not slopes
        assert sees_all or not has_bounds, "rows that see all keys select"
        self._sees_all = sees_all
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._op: Any = library().QuantizedAttention(
            offset_bytes,
            num_heads,
            num_kv_heads,
            head_dim,
            group,
            self.bits,
            scale,
            window or 0,
            soft_cap,
            list(slopes),
            list(sinks),
            *(recent or (0, 0)),
            -1 if bounds_offset is None else bounds_offset,
        )
        self.has_bounds = has_bounds
        self._is_one_call = recent is not None

    def append(
        self, step: TiledAttentionStep, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> None:
        """Stores k, v: [T, Hk, D] fp32 with dense heads and equal strides."""
        assert k.dtype == v.dtype == torch.float32
        assert k.shape == v.shape == (step.num_rows, *self._shape[1:]), f"{k.shape} {v.shape}"
        if k.stride() != v.stride() or k.stride()[1:] != (k.shape[2], 1):
            k, v = k.contiguous(), v.contiguous()
        cos = sin = half = 0
        if rotation is not None:
            check_rotation(rotation, step.num_rows, self._shape[2])
            cos, sin, half = rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[1]
        self._op.append(step.plan, k.data_ptr(), v.data_ptr(), k.stride(0), cos, sin, half)

    def begin(self, step: TiledAttentionStep, q: Tensor) -> Tensor:
        """Begins `attend`, before the step's k and v are appended: single rows attend over the
        earlier keys, as far as these fill whole runs of the kernel. Returns what attend takes as
        `begun`, in the same thread. The step is not prefix_only, and the layer has no recent store.
        Where rows select, all sequences have one row (`step.can_begin`)."""
        assert not self._is_one_call, "recent K/V is read in one call"
        assert not self.has_bounds or step.can_begin, "single rows select"
        heads, _, dim = self._shape
        sums = torch.empty(step.num_single_rows, 2, heads, dim + 2)
        self._attend(step, q, 0, 0, BEGIN, sums.data_ptr())
        return sums

    def attend(
        self,
        step: TiledAttentionStep,
        q: Tensor,
        lse: Tensor | None = None,
        begun: Tensor | None = None,
    ) -> Tensor:
        """Returns attention [T, H, D] for q: [T, H, D] fp32; writes lse: [T, H] fp32, natural log.

        A row that sees no key gets 0 and an lse of -inf. The bits of a row and head depend neither
        on other rows nor on other K/V heads, nor on `begun`, which is overwritten.
        """
        _check_lse(lse, q)
        out = torch.empty(q.shape, dtype=torch.float32)
        phase = () if begun is None else (FINISH, begun.data_ptr())
        self._attend(step, q, out.data_ptr(), address(lse), *phase)
        return out

    def choose(self, step: TiledAttentionStep, q: Tensor) -> Tensor:
        """Returns which tiles of K/V `attend_chosen` reads for any head of any row: uint8, 1 or 0,
        one for each tile of each sequence, the tiles of the sequences one after the other. Reads
        bounds, but no K/V. Rows that do not select read all tiles. The layer has no window."""
        assert self._sees_all, "a layer whose rows see all keys"
        q = self._checked(step, q)
        is_read = torch.empty(step.plan.num_tiles, dtype=torch.uint8)
        self._op.choose(step.plan, q.data_ptr(), q.stride(0), is_read.data_ptr())
        return is_read

    def attend_chosen(
        self, step: TiledAttentionStep, q: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """The same as `attend`, with the same bits, over the tiles that the calling thread chose
        last, which must be for this layer and step and the same q."""
        _check_lse(lse, q)
        q = self._checked(step, q)
        heads, _, dim = self._shape
        out = torch.empty(q.shape, dtype=torch.float32)
        self._op.attend_chosen(
            step.plan, q.data_ptr(), q.stride(0), out.data_ptr(), heads * dim, address(lse)
        )
        return out

    def list_tiles(self, step: TiledAttentionStep, q: Tensor, shares: TileShares) -> Tensor:
        """Returns the lists of the tiles that the rows of a prefix_only step may choose here
        (native_tile_lists.py): int32 [shares.num_words * kv_heads]. Each sequence has one row, and
        its keys are its tiles in `shares` and those that are here of the row's own tile. The layer
        has bounds."""
        self._check_shares(step, shares)
        q = self._checked(step, q)
        lists = torch.empty(shares.num_words * self._shape[1], dtype=torch.int32)
        self._op.list_tiles(step.plan, q.data_ptr(), q.stride(0), *shares.addresses, address(lists))
        return lists

    def attend_listed(
        self,
        step: TiledAttentionStep,
        q: Tensor,
        lists: TileList,
        counts: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """Returns attention [T, H, D] to the counts[t, h] best tiles of each list and to the row's
        own tile, as far as it is here; writes lse. lists: as `list_tiles` returned them for this
        step and q. counts: int32 [T, kv_heads], each at most as many as are listed."""
        shares, words = lists
        self._check_shares(step, shares)
        _check_lse(lse, q)
        heads, kv_heads, dim = self._shape
        assert words.numel() == shares.num_words * kv_heads and words.dtype == torch.int32
        assert counts.shape == (step.num_rows, kv_heads) and counts.dtype == torch.int32
        assert counts.is_contiguous(), "the counts of a row are adjacent"
        q = self._checked(step, q).contiguous()
        out = torch.empty(step.num_rows, heads, dim)
        self._op.attend_listed(
            step.plan,
            q.data_ptr(),
            *shares.addresses,
            words.data_ptr(),
            counts.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out

    def _check_shares(self, step: TiledAttentionStep, shares: TileShares) -> None:
        assert self.has_bounds and step.num_single_rows == step.num_rows == shares.num_rows

    def _attend(self, step: TiledAttentionStep, q: Tensor, out: int, lse: int, *phase: int) -> None:
        """phase: none for one call; else its number and the address of the sums."""
        heads, _, dim = self._shape
        q = self._checked(step, q)
        self._op.attend(step.plan, q.data_ptr(), q.stride(0), out, heads * dim, lse, *phase)

    def _checked(self, step: TiledAttentionStep, q: Tensor) -> Tensor:
        """Returns q with dense heads."""
        heads, _, dim = self._shape
        assert q.dtype == torch.float32 and q.shape == (step.num_rows, heads, dim)
        return q if q.stride()[1:] == (dim, 1) else q.contiguous()


def _check_lse(lse: Tensor | None, q: Tensor) -> None:
    if lse is not None:
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()


class Int8Attention(TiledAttention):
    """One layer over int8 K/V."""

    bits = 8
    min_group = 8


class Int4Attention(TiledAttention):
    """One layer over int4 K/V, whose groups have at least 16 numbers.

    Stored K, V and q are transformed (ops/csrc/kv_tiles4.inl), which callers do not see. Values are
    `ops.reference.round_kv4`; q is rounded to 8 bits, so that a score's error by q is about a tenth
    of that by K.
    """

    bits = 4
    min_group = 16
