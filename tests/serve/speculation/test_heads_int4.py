"""Heads beside a model whose K/V is int4, with recent tokens in 8 bits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import RecentStore, TiledKVLayout
from quant.kv import Int4KVFormat, Int8KVFormat
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.loading.kv_layouts import recent_layout
from serve.loading.precision import Precision
from tests.support.profile import every_day
from tests.support.speculation.heads import PLAIN, check, settings_of
from tests.support.speculation.mixed_requests import results
from tests.support.speculation.scripted import always_draft

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("kind", "family", "variant"),
    every_day(
        [0, 1],
        [
            ("mtp", "glm4_moe", "one-group"),
            ("eagle3", "llama", "long"),
            ("eagle3", "mistral", "long"),
        ],
    ),
)
def test_same_tokens_with_int4_kv(kind, family, variant, tmp_path):
    """The model's recent tokens are in 8 bits by block of 128, and their pages given back; the
    head, whose rows may come later, has all of its own in 8 bits."""
    settings = settings_of(tmp_path, kind, family, variant)
    settings |= {"kv_dtype": "int4", "dtype": "int8", "kv_page_bytes": 4096, "max_num_seqs": 5}
    settings["max_num_batched_tokens"] = 48
    with LLM(**settings | PLAIN) as plain, LLM(**settings) as llm:
        runner = llm._loaded.core._executor._runner
        assert [layer.is_late for layer in runner._model.attention_layers()][-2:] == [False, True]
        assert check(llm, plain, 160) > 400
        drafts = always_draft(llm)
        drafts.most_drafted = functools.partial(_seldom, drafts.most_drafted)
        prompts = [{"prompt_token_ids": [i + 5, *range(20, 95)]} for i in range(5)]
        params = SamplingParams(max_tokens=140, temperature=0.0, ignore_eos=True)
        expected = results(plain.generate(prompts, params, use_tqdm=False))
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected


def _seldom(most_drafted: Any, sequence: Any) -> int:
    """Lets a sequence have drafts now and then, so that the head computes its rows late."""
    found: int = most_drafted(sequence)
    return found if sequence.num_output_tokens % 24 > 21 else 0


def test_late_layers_have_no_int4_kv():
    """Their K/V is in 8 bits, and none of it in the store of recent tokens."""
    layer = AttentionLayer(4, 2, 32, 0.2)
    layers = [layer, layer, replace(layer, is_late=True)]
    formats = [type(form) for form in TiledKVLayout(layers, "int4", 32).formats]
    assert formats == [Int4KVFormat, Int4KVFormat, Int8KVFormat]
    precision = Precision(torch.float32, "int8", "int4", "cpu")
    recent = recent_layout(EngineConfig(), precision, layers)
    assert recent is not None
    assert len(recent.layers) == 2
    places = RecentStore(recent, 0).of([0, 1, 2]).places
    assert places[:2] == [(0, 32), (recent.offsets[1], 32)]
    assert places[2] is None
