"""A start over memory nodes that fails leaves nothing open."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.nodes.node_set import NodeSet
from memory.nodes.prompt_tail_cache import PromptTailCache
from serve import LLM
from serve.loading import remote_memory
from serve.loading.engine_share import RecordMemory
from tests.support.engine.checkpoints import checkpoint
from tests.support.nodes.served_nodes import MIB, nodes


@pytest.mark.parametrize("step", ["RemoteAttention", "KVBesideStates"])
def test_all_that_was_opened_is_closed_when_a_later_step_fails(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    for owner in (NodeSet, RecordMemory, PromptTailCache):
        close = owner.close

        def noted(self: object, close: object = close, name: str = owner.__name__) -> None:
            closed.append(name)
            close(self)  # type: ignore[operator]

        monkeypatch.setattr(owner, "close", noted)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(remote_memory, step, fail)
    settings = {"kv_cache_bytes": 16 * MIB, "max_model_len": 256, "memory_prefill": "local"}
    path = str(checkpoint("qwen3_5_text", "long"))
    with nodes("inproc", 1, tmp_path) as urls, pytest.raises(RuntimeError, match="no memory"):
        LLM(path, memory_nodes=urls, **settings)
    assert closed == ["NodeSet", "RecordMemory", "PromptTailCache"]
