"""Models of which a part is in host memory, beside the same with everything on the device.

The device is Triton's interpreter; copies to it run as late as they may.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from serve.errors import ConfigError
from serve.models import Decoder
from tests.support.cuda.late_link import (
    experts_budget,
    host_weights,
    late_links,
    load_on_device,
    needs_of_model,
    ring_budget,
)
from tests.support.engine import quantized
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import load, run, token_ids

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the attention here is the host's"),
]

IDS = token_ids(4)
CHUNKS = [2, 1, 1]
LONG = pytest.mark.exhaustive


def logits(model: Decoder) -> Tensor:
    return run(model, IDS, CHUNKS)


def divergence(one: Tensor, other: Tensor) -> float:
    """Returns the mean KL divergence of the rows."""
    one, other = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "variant", "dtype"),
    [
        ("llama", "four", "float32"),
        pytest.param("llama", "four", "int8", marks=LONG),
        pytest.param("llama", "four", "int4", marks=LONG),
        pytest.param("llama", "four", "nf4", marks=LONG),
        pytest.param("llama", "four", "bfloat16", marks=LONG),
        pytest.param("gpt2", "base", "float32", marks=LONG),
    ],
)
def test_layers_through_the_ring_give_the_same_bits(family, variant, dtype):
    path = checkpoint(family, variant)
    with late_links() as links:
        whole = load_on_device(path, dtype, None)
        assert whole.weights.stream is None
        want = logits(whole)
        model = load_on_device(path, dtype, ring_budget(path, dtype))
        stream = host_weights(model)
        assert stream.ring is not None
        assert torch.equal(logits(model), want)
    assert links[-1].num_fetched > len(stream.ring.layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gptq-order", "awq"])
def test_quantized_layers_through_the_ring_give_the_same_bits(case, tmp_path):
    path = quantized.write(tmp_path, *quantized.CASES[case], variant="four")[0]
    with late_links():
        want = logits(load_on_device(path, "int8", None))
        model = load_on_device(path, "int8", ring_budget(path, "int8"))
        assert len(host_weights(model).placement.ring_layers) == 4
        assert torch.equal(logits(model), want)


def test_a_pass_that_ends_early_leaves_the_ring_usable():
    path = checkpoint("llama", "four")
    with late_links():
        want = logits(load_on_device(path, "float32", None))
        model = load_on_device(path, "float32", ring_budget(path, "float32"))
        stream = model.weights.stream
        for count in (1, 3):
            blocks = stream.blocks(model.weights.blocks)
            for _ in range(count):
                next(blocks)
            blocks.close()
            assert torch.equal(logits(model), want)


def test_all_experts_on_the_cpu_give_the_logits_of_the_reference():
    """The model has shared experts, which the device computes meanwhile."""
    path = checkpoint("qwen2_moe", "shared")
    want = logits(load(path))
    with late_links():
        model = load_on_device(path, "float32", experts_budget(path, "float32", 2))
        found = logits(model)
        on_cpu = host_weights(model).experts_on_cpu
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert {layer: each.num_rows for layer, each in on_cpu.items()} == {1: 4, 3: 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "variant", "num_on_cpu"),
    [
        ("qwen2_moe", "shared", 1),
        ("qwen3_moe", "long", 1),
        ("deepseek_v3", "long", 2),
        ("gpt_oss", "long", 2),
        ("gemma4_text", "mixture", 2),
    ],
)
def test_experts_on_the_cpu_are_as_close_as_sums_in_another_order(family, variant, num_on_cpu):
    path = checkpoint(family, variant)
    with late_links():
        want = logits(load_on_device(path, "float32", None))
        model = load_on_device(path, "float32", experts_budget(path, "float32", num_on_cpu))
        stream = host_weights(model)
        layers = sorted(stream.experts_on_cpu)
        assert len(layers) == num_on_cpu and stream.ring is None
        mixtures = [at for at, each in enumerate(stream.needs.layers) if each.experts]
        assert layers == mixtures[-num_on_cpu:]
        found = logits(model)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert all(each.num_rows == len(IDS) for each in stream.experts_on_cpu.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int8", "int4", "nf4"])
def test_rounded_experts_on_the_cpu_are_close(dtype):
    """The CPU sums the results of a row's experts as they are, a GPU rounds each to bf16 before."""
    path = checkpoint("qwen3_moe", "long")
    with late_links():
        want = logits(load_on_device(path, dtype, None))
        model = load_on_device(path, dtype, experts_budget(path, dtype, 2))
        found = logits(model)
    assert len(host_weights(model).experts_on_cpu) == 2
    assert divergence(want, found) < 0.006


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "variant"), [("qwen2_moe", "shared"), ("deepseek_v3", "long")])
def test_experts_on_the_cpu_beside_a_ring(family, variant):
    """Heads of latents are combined by their addresses and stay where they are."""
    path = checkpoint(family, variant)
    with late_links() as links:
        want = logits(load_on_device(path, "float32", None))
        model = load_on_device(path, "float32", ring_budget(path, "float32"))
        stream = host_weights(model)
        assert stream.ring is not None and len(stream.experts_on_cpu) == 2
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
        stream.close()
    assert links[-1].is_closed


@pytest.mark.parametrize("dtype", ["int8", "float32", pytest.param("int4", marks=LONG)])
def test_the_device_takes_no_more_than_the_budget(dtype):
    """What the placement counts is no less than what the weights of a layer take."""
    path = checkpoint("llama", "four")
    needs = needs_of_model(path, dtype)
    with late_links():
        stream = host_weights(load_on_device(path, dtype, ring_budget(path, dtype)))
    assert stream.ring is not None
    largest = max(each.products for each in needs.layers)
    assert all(layer.num_bytes <= largest for layer in stream.ring.layers)
    assert stream.ring.buffer_bytes <= 2 * (largest + 256)
    assert min(layer.num_bytes for layer in stream.ring.layers) > 0.8 * largest


def test_what_cannot_work_is_refused(monkeypatch):
    path = checkpoint("qwen3_moe", "long")
    with pytest.raises(ConfigError, match=r"weight_memory_bytes 1 bytes is too little: .*2 layers"):
        load_on_device(path, "float32", 1)
    budget = experts_budget(path, "float32", 1)
    monkeypatch.setattr("serve.loading.host_weights.cache.available_memory", lambda: 1000)
    with (
        late_links(),
        pytest.raises(ConfigError, match=r"host_weight_bytes 900 bytes is too little"),
    ):
        load_on_device(path, "float32", budget)


def test_experts_in_fp8_are_refused():
    path = checkpoint("qwen3_moe", "long")
    budget = needs_of_model(path, "fp8").total - 1
    with pytest.raises(ConfigError, match="CPUs have no products in fp8"):
        load_on_device(path, "fp8", budget)


@pytest.mark.parametrize(("family", "variant"), [("llama", "four"), ("deepseek_v3", "long")])
def test_what_leaves_the_device_is_what_the_placement_counts(family, variant):
    """Products of latents' heads stay, so they are no part of what a layer can give away."""
    path = checkpoint(family, variant)
    needs = needs_of_model(path, "float32")
    with late_links():
        stream = host_weights(load_on_device(path, "float32", ring_budget(path, "float32")))
    assert stream.ring is not None
    for number, layer in zip(stream.placement.ring_layers, stream.ring.layers, strict=True):
        assert 0.95 < layer.num_bytes / needs.layers[number].products <= 1.0


def test_a_lost_device_does_not_keep_the_rest_from_being_freed(caplog):
    path = checkpoint("llama", "four")
    with late_links() as links:
        stream = host_weights(load_on_device(path, "float32", ring_budget(path, "float32")))

    def lost():
        raise RuntimeError("an illegal access")

    links[-1].close = lost
    stream.close()
    stream.close()
    assert caplog.text.count("cannot be waited for") == 1
    assert stream.stats().resident_bytes == 0
