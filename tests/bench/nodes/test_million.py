"""A small sequence over several holders, measured as the one of a million tokens is."""

from __future__ import annotations

import pytest

from bench.nodes.million import Sizes, measure
from ops.cpu import native_library
from tests.support.nodes.served_nodes import nodes

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SIZES = Sizes(tokens=6144, computed=1024, rows=64, steps=12)


def test_a_sequence_grows_over_holders_and_has_the_tokens_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of the checkpoint
    assert 3 * SIZES.segment_tokens in range(SIZES.tokens - 1024, SIZES.tokens)
    alone = measure(SIZES, [], None)
    with nodes("inproc", 2, tmp_path) as urls:
        found = measure(SIZES, urls, None)
    assert found.tokens == alone.tokens
    assert len(found.tokens) == SIZES.steps
    assert len(found.pauses) == 1
    assert found.alone_s > 0 and found.decode_s > 0
