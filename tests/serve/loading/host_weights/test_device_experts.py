"""Experts in host memory that the device computes: the hottest ones, and all for many rows.

The device is Triton's interpreter; copies to it run as late as they may.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ops.cpu import native_library
from serve.loading.host_weights import device_experts
from serve.loading.host_weights.device_experts import give_room
from serve.models import Decoder
from tests.serve.loading.host_weights.test_model import divergence, logits
from tests.support.cuda.late_link import (
    experts_budget,
    host_weights,
    late_links,
    load_on_device,
    needs_of_model,
)
from tests.support.engine.checkpoints import checkpoint

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the attention here is the host's"),
]


def load_beside(family: str, variant: str, dtype: str, num_on_cpu: int, room: float) -> Decoder:
    """Loads a model with so many mixtures in host memory. room: the device memory that is left for
    their experts, in times of those of a mixture."""
    path = checkpoint(family, variant)
    largest = max(each.experts for each in needs_of_model(path, dtype).layers)

    def give(experts: Any, needs: Any, left: int, link: Any, speed: float) -> Any:
        assert 0 < left < largest
        return give_room(experts, needs, int(room * largest), link, speed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_experts, "give_room", give)
        return load_on_device(path, dtype, experts_budget(path, dtype, num_on_cpu) + 64)


def whole(family: str, variant: str, dtype: str) -> Any:
    return logits(load_on_device(checkpoint(family, variant), dtype, None))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_experts_through_the_ring_give_the_bits_of_a_model_on_the_device(dtype):
    with late_links(min_rows=1):
        want = whole("qwen3_moe", "long", dtype)
        model = load_beside("qwen3_moe", "long", dtype, 2, 2.0)
        stream = host_weights(model)
        assert stream.on_device is not None and stream.on_device.ring is not None
        assert torch.equal(logits(model), want)
    assert all(each.num_rows == 0 for each in stream.experts_on_cpu.values())
    stats = stream.stats()
    assert stats.expert_late > 0 == stats.expert_hits == stats.expert_misses


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_logits_are_close_while_experts_change_places(dtype):
    with late_links():
        want = whole("qwen3_moe", "long", dtype)
        model = load_beside("qwen3_moe", "long", dtype, 2, 1.5)
        stream = host_weights(model)
        before = stream.stats()
        for _ in range(2):
            assert divergence(want, logits(model)) < (1e-8 if dtype == "float32" else 0.006)
    after = stream.stats()
    assert after.expert_hits > 0 and after.expert_misses > 0
    assert after.read_bytes > before.read_bytes and after.resident_bytes == before.resident_bytes
    stream.close()
    assert stream.stats().resident_bytes == 0


@pytest.mark.parametrize(
    ("family", "variant", "num_on_cpu"),
    [
        ("qwen2_moe", "shared", 1),
        ("deepseek_v3", "long", 2),
        ("gpt_oss", "long", 2),
        ("gemma4_text", "mixture", 2),
    ],
)
def test_mixtures_of_all_kinds(family, variant, num_on_cpu):
    """Steps of one row have hot and cold experts, the first one of two rows has them copied."""
    with late_links(min_rows=2) as links:
        want = whole(family, variant, "float32")
        model = load_beside(family, variant, "float32", num_on_cpu, 3.0)
        for _ in range(2):
            torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
        stream = host_weights(model)
        assert len(stream.experts_on_cpu) == num_on_cpu
        stats = stream.stats()
        assert min(stats.expert_hits, stats.expert_late, stats.expert_misses) > 0
        stream.close()
    assert links[-1].is_closed


def test_room_is_kept_for_experts_of_the_cpu():
    """Without room of its own, one mixture more leaves the device."""
    path = checkpoint("qwen3_moe", "long")
    with late_links(keeps_room=True, min_rows=64):
        model = load_on_device(path, "float32", experts_budget(path, "float32", 1))
        stream = host_weights(model)
        want = whole("qwen3_moe", "long", "float32")
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert len(stream.experts_on_cpu) == 2 and stream.on_device is not None
    assert stream.stats().resident_bytes <= experts_budget(path, "float32", 1)
