"""Attention within chunks: steps are cut where chunks end."""

from __future__ import annotations

import pytest

from memory.attention.chunked import split_chunks
from memory.attention.grouped import group_layers
from memory.attention.seam import AttentionLayer, AttentionStep


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (1, 5, [(0, 1, 5)]),
        (1, 8, [(0, 1, 8)]),
        (1, 9, [(8, 1, 1)]),
        (5, 5, [(0, 5, 5)]),
        (10, 20, [(8, 6, 8), (16, 4, 4)]),
        (20, 20, [(0, 8, 8), (8, 8, 8), (16, 4, 4)]),
        (8, 16, [(8, 8, 8)]),
        (9, 16, [(0, 1, 8), (8, 8, 8)]),
    ],
)
def test_a_sequence_is_cut_where_chunks_end(
    rows: int, length: int, expected: list[tuple[int, int, int]]
) -> None:
    cut = split_chunks(AttentionStep(0, [100], [rows], [length]), 8)
    found = list(zip(cut.starts, cut.num_rows, cut.kv_lens, strict=True))
    assert found == [(100 + begin, count, kv) for begin, count, kv in expected]


def test_decodes_stay_in_front() -> None:
    cut = split_chunks(AttentionStep(2, [0, 64, 128], [1, 1, 4], [17, 3, 10]), 8)
    assert cut.num_decodes == 2
    assert list(cut.starts) == [16, 64, 128, 136]
    assert list(cut.num_rows) == [1, 1, 2, 2]
    assert list(cut.kv_lens) == [1, 3, 8, 2]


def test_layers_with_chunks_are_a_group_with_a_window() -> None:
    plain = AttentionLayer(4, 2, 16, 0.25)
    window, chunk = (AttentionLayer(4, 2, 16, 0.25, **{name: 32}) for name in ("window", "chunk"))
    layers = [chunk, plain, window, chunk]
    assert group_layers(layers, 100) == [(None, [1]), (32, [0, 3]), (32, [2])]
    assert group_layers(layers, 32) == [(None, [0, 1, 2, 3])]
