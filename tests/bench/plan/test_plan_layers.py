"""Plans of models whose layers differ: mixtures, windows, latents, shared K/V."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.common.checkpoint_shapes import config_of
from bench.plan.capacity import sequence_bytes
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND, expected
from bench.plan.hardware import Device, load_devices
from bench.plan.layers import LayerAttention
from bench.plan.serving import decode_work
from bench.plan.shapes import Precision, Shape, load_shape
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_layouts import expected_groups
from serve.loading.precision import Precision as Resolved
from serve.models import ModelSpec, read_spec
from tests.bench.common.test_checkpoints import write
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.variants.table import VARIANTS, is_first
from tests.support.engine.variants.variant import Variant

# 1 TB/s, and arithmetic that never binds
READER = Device(
    name="reader",
    kind="cpu",
    memory_bytes=100e9,
    bytes_per_s=1e12,
    operations={"bf16": 1e20, "int8": 1e20, "fp32": 1e20},
    cache_bytes=0.0,
)
INT8 = Precision("int8", "int8")


def bound_of(shape: Shape, precision: Precision = INT8) -> MachineCost:
    return MachineCost(shape, precision, Machine(READER), BOUND)


@pytest.mark.parametrize("batch", [1, 8, 32, 1000])
def test_a_mixture_reads_the_experts_that_rows_draw(batch: int) -> None:
    shape = load_shape("qwen3-30b-a3b")
    union = 1 - (1 - 8 / 128) ** batch
    read = shape.block_parameters + shape.head_parameters + union * shape.expert_parameters
    seconds = bound_of(shape).seconds(decode_work(batch, 0))
    assert seconds == pytest.approx((read + batch * shape.kv_token_bytes(INT8)) / 1e12)
    if batch == 1:
        active = shape.active_parameters - shape.embedding_parameters - shape.other_parameters
        assert read == pytest.approx(active)


def test_prompts_multiply_the_experts_of_each_row() -> None:
    shape = load_shape("gpt-oss-20b")
    multiplier = Device(
        name="multiplier",
        kind="cpu",
        memory_bytes=1e12,
        bytes_per_s=1e20,
        operations={"bf16": 1e20, "int8": 1e12, "fp32": 1e20},
        cache_bytes=0.0,
    )
    cost = MachineCost(shape, INT8, Machine(multiplier), BOUND)
    one, two = (cost.products(rows, 0)[0].compute_s for rows in (100, 200))
    per_row = shape.block_parameters + shape.routed_parameters
    assert one == pytest.approx(2 * 100 * per_row / 1e12) and two == pytest.approx(2 * one)


def test_all_experts_are_in_memory() -> None:
    shape = load_shape("qwen3-30b-a3b")
    four = shape.weight_bytes(Precision("int4", "int8", weight_group=128))
    assert 15e9 < four < 17e9, "16 GB in 4 bits, as the published files"


def test_windows_keep_their_keys() -> None:
    """gemma-4-26b-a4b: 25 layers of 8 heads of 256 keep 1,024 tokens, 5 of 2 heads of 512 all."""
    shape, plain = load_shape("gemma-4-26b-a4b"), Precision()
    local, whole = 25 * 2 * 8 * 256 * 2, 5 * 2 * 2 * 512 * 2
    assert shape.kv_by_window(plain) == {1024: local, None: whole}
    assert sequence_bytes(shape, plain, 10_000) == 1024 * local + 10_000 * whole


def test_a_latent_is_stored_once() -> None:
    shape = load_shape("deepseek-v2-lite")
    assert shape.kv_token_bytes(Precision()) == 27 * 2 * (512 + 64)
    (layer,) = shape.layer_attentions()
    assert layer.decode == 2 * 16 * (576 + 512) and layer.prefill == 2 * 16 * (192 + 128)
    int8 = shape.kv_token_bytes(INT8)
    assert 27 * 576 < int8 <= 1.15 * 27 * 576


def test_the_expected_prefill_of_a_latent_is_in_absorbed_form() -> None:
    """The engine never expands a latent; the bound may, since other software can."""
    shape = load_shape("deepseek-v2-lite")
    machine = Machine(load_devices()["h100-sxm"])
    bound, real = (
        MachineCost(shape, Precision(), machine, each).attention
        for each in (BOUND, replace(BOUND, is_overlapped=False))
    )
    one = real.prefill(1, 1000).compute_s
    assert one == pytest.approx(real.decode(1, 1000).compute_s)
    assert one / bound.prefill(1, 1000).compute_s == pytest.approx((576 + 512) / (192 + 128))


def test_shared_kv_takes_nothing_and_is_read() -> None:
    layer = LayerAttention(None, 2, 64, 1, 1, is_shared=True)
    assert layer.stored_bytes("bfloat16", 64) == 0
    assert layer.read_bytes("bfloat16", 64) == 2 * 2 * 64 * 2


def test_sizes_that_int8_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="no latents of 40"):
        LayerAttention(None, 1, 40, 1, 1, value_dim=33).read_bytes("int8", 64)


@pytest.mark.parametrize("variant", [each for each in VARIANTS if is_first(each)], ids=str)
def test_every_family_has_the_bytes_of_its_layouts(variant: Variant) -> None:
    """The plan's K/V of a token is that of the server's layouts, and a step has a cost."""
    path = checkpoint(variant.family, variant.name)
    spec, shape = read_spec(path), load_shape(str(path))
    assert shape.kv_token_bytes(Precision("float32", "float32")) == stored_bytes(spec)
    assert shape.num_layers == spec.num_layers
    plain = Precision("float32", "float32")
    cost = MachineCost(shape, plain, Machine(READER), expected("cpu", plain))
    assert cost.seconds(decode_work(2, 3)) > 0


def stored_bytes(spec: ModelSpec) -> float:
    precision = Resolved(torch.float32, "plain", "float32")
    groups = expected_groups(EngineConfig(), precision, spec)
    return sum(group.token_bytes for group in groups if not group.is_state)


def test_a_checkpoint_of_random_weights_is_planned(tmp_path: Path) -> None:
    path = write(tmp_path / "mixture", config_of("tiny-mixture"))
    shape = load_shape(str(path))
    file_bytes = (path / "model.safetensors").stat().st_size
    assert 0 < file_bytes - 2 * shape.num_parameters < 20_000, "a header"
    assert shape.active_parameters < shape.num_parameters
