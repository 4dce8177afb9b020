"""The engine on the CUDA back end with a part of the weights in host memory, with Triton's kernels
in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from serve import LLM
from serve.errors import ConfigError
from serve.loading import footprint
from serve.loading.host_weights import device_experts
from serve.loading.host_weights.cache import HostWeights
from serve.loading.host_weights.link import open_link
from serve.loading.host_weights.ring import DeviceRing, RingLayer
from tests.support.cuda.late_link import experts_budget, needs_of_model, ring_budget
from tests.support.engine.checkpoints import checkpoint, reference_greedy
from tests.whole.cuda.test_cuda_engine import NUM_TOKENS, cuda_llm, greedy, prompts_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]

pytest.importorskip("triton")


def stream_of(llm: LLM) -> HostWeights:
    stream = llm._loaded.weight_stream
    assert isinstance(stream, HostWeights)
    return stream


def check(llm: LLM, family: str, variant: str) -> None:
    """Compares greedy tokens with Transformers', of prompts in chunks beside a sampled request."""
    prompts = prompts_of(300, seed=len(family + variant))
    params = [greedy(), greedy(temperature=0.9, seed=3, top_p=0.8), greedy()]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().pages_in_use == 0
    for number in (0, 2):
        expected = reference_greedy(checkpoint(family, variant), prompts[number], NUM_TOKENS)
        assert outputs[number].outputs[0].token_ids == expected, f"prompt {number}"


def test_layers_through_a_ring():
    budget = ring_budget(checkpoint("llama", "four"), "float32")
    with cuda_llm("llama", "four", max_num_batched_tokens=20, weight_memory_bytes=budget) as llm:
        stream = stream_of(llm)
        assert stream.ring is not None and len(stream.ring.layers) == 4
        check(llm, "llama", "four")
        copied = stream.ring.copied_bytes
    assert copied > 4 * sum(layer.num_bytes for layer in stream.ring.layers)


@pytest.mark.parametrize(
    ("family", "variant", "min_rows"), [("qwen2_moe", "shared", 8), ("deepseek_v3", "long", None)]
)
def test_experts_on_the_cpu(family, variant, min_rows, monkeypatch):
    """The hottest ones are on the device meanwhile, and those of steps with min_rows come to it."""
    monkeypatch.setattr(device_experts, "rows_worth_copying", lambda *_: min_rows)
    budget = experts_budget(checkpoint(family, variant), "float32", 1)
    settings = {"max_num_batched_tokens": 20, "weight_memory_bytes": budget}
    with cuda_llm(family, variant, **settings) as llm:
        stream = stream_of(llm)
        on_cpu = list(stream.experts_on_cpu.values())
        assert on_cpu and stream.on_device is not None
        check(llm, family, variant)
        stats = stream.stats()
        assert stats.expert_misses > 0 and (stats.expert_late > 0) == (min_rows is not None)
        if min_rows is None:
            assert stats.expert_hits > 0
            assert all(each.num_rows >= sum(map(len, prompts_of(300, 0))) for each in on_cpu)
    assert stream.stats().resident_bytes == 0


def test_weights_that_do_not_fit_leave_by_themselves(monkeypatch, caplog):
    """Without the setting, 75 % of what is free is for weights."""
    path = checkpoint("llama", "four")
    caplog.set_level("INFO")
    free = int(ring_budget(path, "float32") / 0.75) + 8
    monkeypatch.setattr(footprint, "free_memory", lambda precision: free)
    with cuda_llm("llama", "four", kv_cache_bytes=None) as llm:
        assert stream_of(llm).ring is not None
    assert "the rest is in host memory, or on the disk" in caplog.text
    assert "tokens a second for one request" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_nodes": "inproc://no-node"}, "weight_memory_bytes: .* memory_nodes"),
        ({"tensor_parallel_size": 2}, "weight_memory_bytes: .* tensor_parallel_size"),
        ({"weight_memory_bytes": 1000}, "weight_memory_bytes .* too little"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        cuda_llm("llama", "four", **({"weight_memory_bytes": 1 << 20} | settings))


def test_a_real_link_moves_a_layer():
    """On a GPU these are its streams and page-locked memory."""
    from ops.cuda.backend import cuda_device

    link = open_link(cuda_device())
    rows = [torch.randn(64, 33, device=link.device) for _ in range(3)]
    want = [each.clone() for each in rows]
    ring = DeviceRing([RingLayer([each], link) for each in rows], 2, link)
    for _ in range(2):
        for number, each in enumerate(rows):
            ring.enter(number)
            assert torch.equal(each, want[number])
            ring.leave(number)
    link.mark()()
    link.close()


def test_all_weights_on_the_device_need_no_stream():
    needs = needs_of_model(checkpoint("llama", "four"), "float32")
    with cuda_llm("llama", "four", weight_memory_bytes=2 * needs.total) as llm:
        assert llm._loaded.weight_stream is None
