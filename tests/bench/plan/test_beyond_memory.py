"""`serve plan` predicts a model that is larger than this machine's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan.beyond_memory import beyond_memory, needs_of
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import expected
from bench.plan.hardware import HERE, Device, load_devices
from bench.plan.shapes import Precision, load_shape

INT8 = Precision("int8", "int8")


def cost_on(memory_bytes: float, model: str, name: str = HERE) -> MachineCost:
    device: Device = next(each for each in load_devices(None).values() if each.kind == "cpu")
    device = replace(device, name=name, memory_bytes=memory_bytes)
    return MachineCost(load_shape(model), INT8, Machine(device), expected(device, INT8))


def test_a_step_takes_as_long_as_reading_what_does_not_fit() -> None:
    cost = cost_on(6e9, "llama-3.1-8b")
    found = beyond_memory(cost, (1, 32), 512, lambda: 1e9)
    assert found is not None and found.disk_bytes_per_s == 1e9
    for _, read, seconds in found.steps:
        assert seconds == pytest.approx(read / 1e9)
    (_, read, _), *_ = found.steps
    shape = load_shape("llama-3.1-8b")
    products = shape.block_bytes(INT8) + shape.head_bytes(INT8)
    assert products - 4.5e9 < read < products - 4.5e9 + 5 * products / shape.num_layers
    assert found.memory_bytes <= 4.5e9


def test_of_a_mixture_the_experts_that_are_drawn_are_read() -> None:
    cost = cost_on(20e9, "qwen3-30b-a3b")
    found = beyond_memory(cost, (1, 64), 512, lambda: 1e9)
    assert found is not None
    (_, one, _), (_, many, _) = found.steps
    experts = sum(8 * each.parameters for each in cost.shape.mixtures)
    assert 0.3 * experts < one < 0.7 * experts < 8 * one < 2 * many


def test_the_needs_are_all_weights() -> None:
    for model in ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"):
        shape = load_shape(model)
        assert needs_of(shape, INT8).total == pytest.approx(shape.weight_bytes(INT8), rel=1e-3)


def test_nothing_is_said_where_the_weights_fit_or_of_other_machines() -> None:
    assert beyond_memory(cost_on(64e9, "llama-3.1-8b"), (1,), 512, lambda: 1e9) is None
    other = cost_on(6e9, "llama-3.1-8b", "another")
    assert beyond_memory(other, (1,), 512, lambda: 1e9) is None
    assert beyond_memory(cost_on(3e8, "llama-3.1-8b"), (1,), 512, lambda: 1e9) is None
