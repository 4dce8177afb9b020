"""What the memory between ranks holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import transport
from serve.config import EngineConfig
from serve.group.grid import Grid
from serve.group.links.stage_link import largest_hidden
from serve.group.sizes import (
    SHARED_SPIN_S,
    SPIN_S,
    arena_bytes,
    open_exchange,
    spin_s,
    stage_window_bytes,
)
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint
from transport.arena import Arena

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


@pytest.mark.parametrize(
    ("asked", "expected"), [(spin_s(2, 2), SPIN_S), (spin_s(3, 2), SHARED_SPIN_S), (9.0, SPIN_S)]
)
def test_a_rank_with_a_core_of_its_own_stays_awake_in_barriers(monkeypatch, asked, expected):
    """Also one that is kept to a single core, as ranks are where there is a core for each."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    path = checkpoint("llama")
    config, spec = EngineConfig.from_settings(path, max_num_batched_tokens=16), read_spec(path)
    arena, opened, open_arena = Arena.create(arena_bytes(config, spec), 2), [], Arena.open
    monkeypatch.setattr(Arena, "open", lambda *args: opened.append(open_arena(*args)) or opened[0])
    try:
        source = SimpleNamespace(config=config, spec=spec)
        exchange = open_exchange(source, Grid(2, ((0, spec.num_layers),)), 0, arena.path, asked)
        assert exchange is not None and opened[0].spin_s == pytest.approx(expected)
        exchange.close()
    finally:
        arena.close()
