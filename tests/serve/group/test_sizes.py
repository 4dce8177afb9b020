"""What the memory between ranks holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import transport
from serve.config import EngineConfig
from serve.group.links.stage_link import largest_hidden
from serve.group.sizes import stage_window_bytes
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint

KEY = b"tests of windows"


@pytest.mark.parametrize("hidden_size", [64, 2048, 2049, 5120])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_window_holds_the_largest_hidden_states(hidden_size, num_stages):
    path = checkpoint("llama")
    spec = replace(read_spec(path), hidden_size=hidden_size)
    config = EngineConfig.from_settings(path, max_num_batched_tokens=300)
    window = stage_window_bytes(config, spec, num_stages)
    url = f"inproc://window-{hidden_size}-{num_stages}"
    listener = transport.listen(url, key=KEY, window_bytes=1 << 16)
    try:
        end = transport.connect(url, key=KEY, window_bytes=window)
        sender = listener.accept(5.0)
        assert sender is not None
        assert sender.max_message_bytes >= largest_hidden(300, hidden_size)
        end.close()
        sender.close()
    finally:
        listener.close()
