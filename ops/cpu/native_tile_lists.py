"""Which tiles rows choose where several machines have some of a sequence's tiles
(ops/csrc/attention_share.inl): lists of what each machine has, and how many of it are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.cpu.native_library import library

_BITS = 32  # of a word


class TileShares:
    """What some rows, each of a sequence of its own, may choose of one machine's tiles."""

    def __init__(self, num_tiles: Sequence[int], wanted: Sequence[int]) -> None:
        """num_tiles: for each row, how many tiles before its own are on this machine, the first
        ones of its sequence here. wanted: how many tiles it chooses of all on all machines."""
        assert len(num_tiles) == len(wanted), "both for each row"
        listed = [min(n, most) for n, most in zip(num_tiles, wanted, strict=True)]
        assert all(n >= 0 for n in listed), f"{num_tiles=} {wanted=}"
        self.num_rows = len(listed)
        self.num_tiles = torch.tensor(num_tiles, dtype=torch.int32)
        self.wanted = torch.tensor(wanted, dtype=torch.int32)
        self.listed = torch.tensor(listed, dtype=torch.int32)
        self.num_tiles_all = sum(num_tiles)
        self.num_words = sum([_words(n, most) for n, most in zip(num_tiles, listed, strict=True)])
        """The length of the lists of one K/V head, in numbers of 32 bits."""

    @property
    def addresses(self) -> tuple[int, int]:
        return self.num_tiles.data_ptr(), self.wanted.data_ptr()


class TileList(NamedTuple):
    """One machine's lists of tiles of some rows: int32 [shares.num_words * kv_heads]."""

    shares: TileShares
    words: Tensor


def count_tiles(lists: Sequence[TileList], num_kv_heads: int) -> list[Tensor]:
    """Returns how many tiles of each machine's list are chosen, int32 [rows, num_kv_heads], so that
    each row has its `wanted` best ones. lists: of the same rows; of n machines, number i has tiles
    i, i + n, ... of each sequence."""
    num_rows = lists[0].shares.num_rows
    counts = torch.zeros(len(lists), num_rows, num_kv_heads, dtype=torch.int32)
    parts: list[int] = []
    for (shares, words), found in zip(lists, counts, strict=True):
        assert shares.num_rows == num_rows, "the rows of all lists are the same"
        assert words.dtype == torch.int32 and words.numel() == shares.num_words * num_kv_heads
        parts += [*shares.addresses, words.data_ptr(), found.data_ptr()]
    library().count_tiles(parts, num_rows, num_kv_heads)
    return list(counts.unbind(0))


def _words(num_tiles: int, listed: int) -> int:
    """Returns the length of a list: the scores, and a bit for each tile if some are not listed."""
    has_bits = 0 < listed < num_tiles
    return listed + (-(-num_tiles // _BITS) if has_bits else 0)
