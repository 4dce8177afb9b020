"""The bound of mixtures, windows and latents, and the experts that steps drew."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from bench.cli.latency import latency
from bench.common.checkpoint_shapes import config_of
from bench.common.mixtures import MixtureSize
from bench.common.model_cost import ModelCost, attention_costs, mixture_sizes
from bench.offline.routings import RoutingLog
from ops.backend import Router, RouterKind
from ops.cpu.backend import CpuBackend
from serve.config import EngineConfig
from serve.engine.step_trace import TracedStep
from serve.loading.footprint import weight_bytes
from serve.loading.precision import Precision
from serve.models import ModelSpec, count_parameters, read_spec
from serve.scheduler.step_time import StepWork

INT8 = Precision(torch.float32, "int8", "int8")


def spec_of(shape: str, folder: Path, **changes: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config_of(shape) | changes))
    return read_spec(folder)


def cost_of(spec: ModelSpec, kv_bytes: float = 100.0) -> ModelCost:
    return ModelCost(spec, INT8, weight_bytes(EngineConfig(), spec, INT8), kv_bytes)


def traced(rows: int) -> TracedStep:
    return TracedStep(0.0, 1.0, StepWork(rows, 0, rows, samples=True), rows, 0, 1)


def test_the_expected_union_is_that_of_drawing() -> None:
    """Against drawing top_k of the experts for each row many times."""
    rng, mixture = random.Random(1), MixtureSize(16, 3, 1)
    for rows in (1, 2, 8, 40):
        drawn = [
            len({expert for _ in range(rows) for expert in rng.sample(range(16), 3)})
            for _ in range(2000)
        ]
        assert mixture.drawn(rows) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert mixture.drawn(0) == 0 and mixture.drawn(1e6) == 16


def test_a_row_reads_the_active_weights(tmp_path: Path) -> None:
    """At batch 1 all that is active but the table; with every expert drawn, all of the model."""
    spec = spec_of("qwen3-30b-a3b", tmp_path, quantization_config=None)
    counts, cost = count_parameters(spec), cost_of(spec)
    one = cost.step(StepWork(1, 0, 1, samples=True))
    active = counts.active - counts.tables - counts.others
    assert one.read_bytes == pytest.approx(active) and one.products == pytest.approx(2 * active)
    everything = cost.step(StepWork(8, 0, 8, samples=True), drawn=[128] * 48)
    assert everything.read_bytes == pytest.approx(counts.blocks + counts.experts + counts.head)
    assert everything.products == pytest.approx(2 * 8 * active), "a row multiplies its own experts"
    even = cost.step(StepWork(8, 0, 8, samples=True))
    union = 128 * (1 - (1 - 8 / 128) ** 8) / 128
    assert even.read_bytes == pytest.approx(counts.blocks + counts.head + union * counts.experts)


def test_the_bytes_of_4_bits_count_scales(tmp_path: Path) -> None:
    spec = spec_of("qwen3-30b-a3b", tmp_path, quantization_config=None)
    precision = Precision(torch.float32, "int4", "int8")
    weights = weight_bytes(EngineConfig(weight_group=128), spec, precision)
    cost = ModelCost(spec, precision, weights, 0.0)
    per_expert = 3 * 2048 * 768 * (4 + 16 / 128) / 8
    assert cost.expert_bytes(1) == pytest.approx(48 * 8 * per_expert)


def test_windows_bound_keys(tmp_path: Path) -> None:
    """gpt-oss: every other layer sees 128 keys."""
    spec = spec_of("gpt-oss-20b", tmp_path, quantization_config=None)
    cost = cost_of(spec, kv_bytes=2400.0)
    long, none = (cost.step(StepWork(2, 2 * n, 2, samples=True)) for n in (1000, 0))
    assert long.read_bytes - none.read_bytes == pytest.approx(2 * 1200 * (1000 + 128))
    widths = 4 * 64 * 64
    assert long.attention == pytest.approx(12 * widths * 2 * (1001 + 128))
    chunk = cost.step(StepWork(0, 0, 4, 4 * 1000, 1))
    assert chunk.attention == pytest.approx(12 * widths * 4 * (1000 + 128))


def test_latents_are_read_once(tmp_path: Path) -> None:
    """One latent of 512 + 64 values serves all heads, as keys and as values."""
    spec = spec_of("deepseek-v2-lite", tmp_path, quantization_config=None)
    layers = attention_costs(spec, kv_bytes=27 * 576.0)
    assert {layer.kv_bytes for layer in layers} == {576.0}
    assert {layer.decode for layer in layers} == {2 * 16 * (576 + 512)}
    assert {layer.prefill for layer in layers} == {2 * 16 * (192 + 128)}
    assert len(mixture_sizes(spec)) == 26, "the first layer is dense"


def test_the_log_has_the_experts_of_each_step() -> None:
    backend, log = CpuBackend(), RoutingLog(num_mixtures=2)
    router = Router(RouterKind(top_k=2), torch.eye(8))
    rows = torch.zeros(3, 8)
    rows[0, :2] = rows[1, 1:3] = rows[2, :2] = 5.0  # experts 0 and 1, 1 and 2, 0 and 1
    plain = CpuBackend.route
    with log.recording():
        for part in (rows[:1], rows[1:], rows):  # three passes of two layers
            backend.route(part, router)
            backend.route(part, router)
    assert CpuBackend.route is plain
    backend.route(rows, router)
    assert log.drawn([traced(1), traced(2), traced(3)]) == [[2, 2], [3, 3], [3, 3]]
    assert log.drawn([traced(1), traced(3)]) == [[2, 2], [3, 3]], "the second was taken back"
    assert log.drawn([traced(4)]) is None
    log.clear()
    assert log.drawn([traced(1)]) is None and RoutingLog(0).drawn([traced(1)]) is None


@pytest.mark.exhaustive
def test_latency_of_a_mixture_tells_the_experts_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = latency("random:tiny-mixture", batches=(1, 8), context=8, steps=4, quick=True)
    experts = result["experts"]
    assert experts["decode_1"] == {"drawn": 2.0, "even": pytest.approx(2.0)}
    assert 2 <= experts["decode_8"]["drawn"] <= 8
    assert experts["decode_8"]["even"] == pytest.approx(8 * (1 - 0.75**8))
    assert all(math.isfinite(share) for share in result["share_of_bound"].values())
