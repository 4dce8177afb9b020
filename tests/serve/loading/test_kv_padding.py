"""The size of K/V memory whose tiles are padded to whole pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memory.pages.layer_groups import LayerGroup
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.kv_sizing import size_kv
from serve.models import read_spec


@pytest.mark.parametrize("token_bytes", [17984, 16896, 1100, 260])
def test_one_sequence_fits_at_full_length(token_bytes: int) -> None:
    """Padding adds up over a long sequence: 17,984 bytes are those of the 1B shape with bounds."""
    config = EngineConfig(model=DEFAULT_MODEL, max_num_seqs=1, max_model_len=16448)
    spec = replace(read_spec(config.model_path), max_model_len=65536)
    group = LayerGroup(token_bytes, 16, None)
    found = size_kv(config, spec, [group], free_bytes=1 << 40, is_trial=True)
    assert found.max_model_len == 16448
