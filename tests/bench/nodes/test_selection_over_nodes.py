"""The measurement of steps that read a part of the K/V on a node, on small sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.nodes.selection import QUICK, measure, table_of
from ops.cpu import native_library

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


@pytest.mark.exhaustive
def test_each_number_of_sequences_and_context_is_measured(tmp_path):
    found = measure(QUICK, tmp_path)
    assert [(one.context, one.count) for one in found] == [
        (context, count) for context in QUICK.contexts for count in QUICK.counts
    ]
    for one in found:
        assert min(one.whole_s, one.selected_s, one.local_s) > 0
        assert one.recompute_s > one.local_s, "hundreds of rows take longer than one"
        assert one.recomputed_rate(8) < 8 / one.recompute_s
        assert one.choices_s == 0, "the only node has all tiles"
    assert table_of(found, QUICK).row_count == len(found)


@pytest.mark.exhaustive
def test_choices_among_the_tiles_of_several_nodes_are_measured(tmp_path):
    sizes = replace(QUICK, contexts=(512,), counts=(2,), partitions=("sequence",), num_nodes=2)
    [one] = measure(sizes, tmp_path)
    assert one.partition == "sequence"
    assert 0 < one.choices_s < one.selected_s
