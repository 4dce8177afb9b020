"""An engine that stops does not wait for a memory node that hangs, although it would wait half a
minute before it counts such a node as lost."""

from __future__ import annotations

import threading
import time

import pytest

from memory.nodes.node_link import DEFAULT_ANSWER_S
from memory.nodes.server.node_loop import NodeLoop
from serve import LLM, SamplingParams
from serve.engine import core
from tests.support.engine.checkpoints import checkpoint
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.transport.transport_rig import wait_until

PARAMS = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


class NodeHang:
    """Stops nodes from taking messages between `begin` and `end`; their heartbeats continue."""

    def __init__(self, monkeypatch):
        self.num_held = 0
        self._continues = threading.Event()
        self._continues.set()
        take = NodeLoop.take

        def take_later(loop, frame):
            if not self._continues.is_set():
                self.num_held += 1
                self._continues.wait(60)
            take(loop, frame)

        monkeypatch.setattr(NodeLoop, "take", take_later)

    def begin(self):
        self._continues.clear()

    def end(self):
        self._continues.set()


@pytest.fixture
def hang(monkeypatch):
    made = NodeHang(monkeypatch)
    yield made
    made.end()


@pytest.mark.timing
@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_a_stopping_engine_does_not_wait_for_a_hung_node(scheme, hang, tmp_path, monkeypatch):
    assert core._STEP_END_S <= 2.0 < DEFAULT_ANSWER_S / 4
    monkeypatch.setattr(core, "_STEP_END_S", 0.5)
    ended = []
    with nodes(scheme, 1, tmp_path) as urls:
        llm = LLM(
            str(checkpoint("llama")),
            memory_nodes=urls,
            memory_node_key_file=key_file(tmp_path) if scheme == "tcp" else None,
            max_model_len=128,
            kv_cache_bytes=MIB,
        )
        llm.generate("hi", PARAMS, use_tqdm=False)

        def generate():
            [output] = llm.generate("hi", PARAMS, use_tqdm=False)
            ended.append(output.outputs[0].finish_reason)

        thread = threading.Thread(target=generate)
        hang.begin()
        thread.start()
        wait_until(lambda: hang.num_held)
        time.sleep(0.1)  # until the loop waits for the answer
        assert llm.stats().memory_nodes_lost == 0
        began = time.monotonic()
        llm.shutdown()
        seconds = time.monotonic() - began
        hang.end()
        thread.join(10)
    assert ended == ["abort"]
    assert 0.4 < seconds < 2.5, "the step may take _STEP_END_S to end"
