"""A model whose weights stream from the disk computes the bits of one that is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.errors import ConfigError
from serve.loading.streaming import division, tables
from serve.loading.streaming.cache import StreamingCache
from serve.loading.streaming.placement import Speeds
from tests.support.engine.decoders import run
from tests.support.models.packed_models import IDS, cache_for, copy_of_model, logits, start

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]

SPEEDS = Speeds(1e9, 1e10)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and heads of test models are small, too."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(tables, "READ_BLOCKS", 3)
    monkeypatch.setattr(division, "_MIN_HEAD_BYTES", 0)


def streaming(budget: int) -> StreamingCache:
    return StreamingCache(cache_for(), budget, 64 << 20, SPEEDS)


def least(path: Path, weights: str) -> int:
    """Returns the least budget with which a model can be loaded."""
    with pytest.raises(ConfigError, match="weight_memory_bytes"):
        start(path, streaming(1), weights=weights)
    low, high = 1, 1 << 26
    while low < high:
        middle = (low + high) // 2
        try:
            start(path, streaming(middle), weights=weights).weights.stream.close()
            high = middle
        except ConfigError:
            low = middle + 1
    return low


@pytest.mark.parametrize(
    ("family", "variant", "weights"),
    [
        ("llama", "base", "int8"),
        ("llama", "base", "int4"),
        ("llama", "base", "bfloat16"),
        ("llama", "gptq", "int8"),
        ("qwen2", "base", "int8"),
        ("qwen3_moe", "head-24", "int8"),
        ("qwen3_moe", "head-24", "bfloat16"),
        ("deepseek_v3", "yarn", "int8"),
        ("gpt_oss", "yarn", "int8"),
        ("qwen3_next", "odd", "int8"),
        ("kimi_linear", "odd", "bfloat16"),
        ("falcon_h1", "gate", "bfloat16"),
        ("nemotron_h", "latent", "int8"),
    ],
)
def test_with_the_least_memory(family: str, variant: str, weights: str, tmp_path: Path) -> None:
    path = copy_of_model(family, variant, tmp_path)
    want = logits(path, weights=weights)
    budget = least(path, weights)
    model = start(path, streaming(budget), weights=weights)
    for _ in range(3):
        assert torch.equal(run(model, IDS), want)
    stream = model.weights.stream
    stats = stream.stats()
    assert stats.resident_bytes <= budget and stats.read_bytes > 0 and stats.failed == 0
    stream.close()
    assert stream.stats().resident_bytes == 0
