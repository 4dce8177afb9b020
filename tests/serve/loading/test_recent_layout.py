"""Which K/V keeps recent tokens in int8, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memory.attention.seam import AttentionLayer
from memory.pages.layer_groups import PageLayout
from quant.kv import RECENT_BLOCK
from serve.config import DEFAULT_MODEL, EngineConfig, default_model_path
from serve.loading.kv_layouts import expected_groups, keeps_recent
from serve.loading.kv_sizing import size_kv
from serve.loading.precision import Precision
from serve.models import read_spec

INT4 = Precision(torch.float32, "int8", "int4")
LAYER = AttentionLayer(4, 2, 64, 0.125)


@pytest.mark.parametrize(
    ("settings", "layers", "kv", "expected"),
    [
        ({}, [LAYER], "int4", True),
        ({}, [LAYER], "int8", False),
        ({}, [LAYER], "float32", False),
        ({"lend": "inproc://a"}, [LAYER], "int4", True),
        ({"memory_nodes": ["inproc://a"]}, [LAYER], "int4", False),
        ({"kvp": ["inproc://a"]}, [LAYER], "int4", False),
        ({"borrow": ["inproc://a"]}, [LAYER], "int4", False),
        ({}, [LAYER, replace(LAYER, window=100)], "int4", True),
        ({}, [LAYER, replace(LAYER, chunk=8192)], "int4", True),
        ({}, [LAYER, replace(LAYER, chunk=96)], "int4", False),
    ],
)
def test_recent_tokens_are_kept_by_an_engine_that_has_all_kv(settings, layers, kv, expected):
    config = EngineConfig(model=DEFAULT_MODEL, **settings)
    assert keeps_recent(config, replace(INT4, kv=kv), layers) is expected


def sizes(kv: str, free_bytes: int, **settings):
    spec, config = read_spec(default_model_path()), EngineConfig(model=DEFAULT_MODEL, **settings)
    precision = replace(INT4, kv=kv)
    groups = expected_groups(config, precision, spec)
    return size_kv(config, spec, groups, free_bytes=free_bytes, is_trial=True)


def test_long_sequences_take_less_than_in_int8_and_short_ones_more():
    held = {}
    for kv in ("int8", "int4"):
        found = sizes(kv, 64 << 20, kv_page_bytes=4096)
        layout = PageLayout(found.groups, found.page_bytes, found.max_model_len, 256)
        held[kv] = [found.page_bytes * layout.pages_at(n) for n in (64, RECENT_BLOCK, 400, 1024)]
    ratios = [one / other for one, other in zip(held["int4"], held["int8"], strict=True)]
    assert 1.4 < ratios[0] < 2.0
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[2] < 1 and ratios[3] < 0.75


def test_no_more_memory_is_asked_for_than_sequences_can_use():
    """The int8 store never has more than a block and a chunk of each."""
    few = {"max_num_seqs": 2, "max_chunk_tokens": 128, "max_model_len": 1024}
    taken = {kv: sizes(kv, 1 << 30, **few) for kv in ("int8", "int4")}
    most = {kv: x.num_pages * x.page_bytes for kv, x in taken.items()}
    assert most["int4"] < most["int8"]
