"""`serve plan` predicts a model that is larger than this machine's memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.plan.beyond_memory import (
    Beyond,
    BeyondMemory,
    beyond_memory,
    device_needs,
    needs_of,
    print_beyond,
)
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import expected
from bench.plan.hardware import HERE, Device, load_devices
from bench.plan.shapes import Precision, load_shape
from ops.cpu import native_library
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.loading.streaming.placement import least_bytes, place
from serve.loading.streaming.tables import memory_for
from serve.machine import total_memory
from serve.units import format_memory
from tests.support.models.packed_models import start
from tests.support.models.streamed import noted_needs, streaming

INT8 = Precision("int8", "int8")
DEVICES = load_devices(None)
PLAIN = DEVICES, Beyond(), lambda: 1e9


def cost_on(memory_bytes: float, model: str, name: str = HERE) -> MachineCost:
    device: Device = next(each for each in load_devices(None).values() if each.kind == "cpu")
    device = replace(device, name=name, memory_bytes=memory_bytes)
    return MachineCost(load_shape(model), INT8, Machine(device), expected(device, INT8))


def test_a_step_takes_as_long_as_reading_what_does_not_fit() -> None:
    cost = cost_on(6e9, "llama-3.1-8b")
    found = beyond_memory(cost, (1, 32), 512, *PLAIN)
    assert found is not None and found.disk_bytes_per_s == 1e9
    for _, _, read, seconds in found.steps:
        assert seconds == pytest.approx(read / 1e9)
    (_, _, read, _), *_ = found.steps
    shape = load_shape("llama-3.1-8b")
    products = shape.block_bytes(INT8) + shape.head_bytes(INT8)
    assert products - 4.5e9 < read < products - 4.5e9 + 5 * products / shape.num_layers
    assert found.memory_bytes <= 4.5e9


def test_of_a_mixture_the_experts_that_are_drawn_are_read() -> None:
    cost = cost_on(20e9, "qwen3-30b-a3b")
    found = beyond_memory(cost, (1, 64), 512, *PLAIN)
    assert found is not None
    (_, _, one, _), (_, _, many, _) = found.steps
    experts = sum(8 * each.parameters for each in cost.shape.mixtures)
    assert 0.3 * experts < one < 0.7 * experts < 8 * one < 2 * many


def test_the_needs_are_all_weights() -> None:
    for model in ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"):
        shape = load_shape(model)
        assert needs_of(shape, INT8).total == pytest.approx(shape.weight_bytes(INT8), rel=1e-3)


def test_nothing_is_said_where_the_weights_fit_or_of_other_machines() -> None:
    assert beyond_memory(cost_on(64e9, "llama-3.1-8b"), (1,), 512, *PLAIN) is None
    other = cost_on(6e9, "llama-3.1-8b", "another")
    assert beyond_memory(other, (1,), 512, *PLAIN) is None
    assert beyond_memory(cost_on(3e8, "llama-3.1-8b"), (1,), 512, *PLAIN) is None


@pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_placement_is_that_of_a_server(dtype: str, tmp_path: Path) -> None:
    path, precision = EngineConfig(DEFAULT_MODEL).model_path, Precision(dtype, "int8")
    with noted_needs() as found, pytest.raises(ConfigError):
        start(path, streaming(1, tmp_path), weights=dtype)
    needs, planned = found[-1], needs_of(load_shape(str(path)), precision)
    assert least_bytes(planned) == least_bytes(needs)
    for budget in range(least_bytes(needs), needs.total + 1, 1 << 18):
        one, other = place(needs, budget), place(planned, budget)
        assert other.has_tables == one.has_tables and other.buffers == one.buffers
        assert other.is_resident == one.is_resident
        assert other.streamed_bytes == pytest.approx(one.streamed_bytes, rel=0.03)
        assert other.num_bytes == pytest.approx(one.num_bytes, rel=0.03)


def test_a_large_table_has_a_buffer_for_its_rows() -> None:
    needs = needs_of(load_shape("llama-3.1-8b"), INT8)
    assert needs.row_bytes == memory_for(4096 * 2) and needs.table_bytes == 128256 * 4096 * 2
    least = needs.fixed_bytes + needs.row_bytes + 2 * max(needs.units)
    cost = cost_on(6e9, "llama-3.1-8b")
    for budget, is_enough in ((least, True), (least - 1, False)):
        with (
            contextlib.nullcontext()
            if is_enough
            else pytest.raises(
                ConfigError, match=f"weight-memory-bytes {format_memory(budget)} is too little"
            )
        ):
            beyond_memory(cost, (1,), 512, DEVICES, Beyond(weight_bytes=budget, disk=1e9))


def plain_cost(model: str, name: str, num_devices: int = 1) -> MachineCost:
    device = DEVICES[name]
    machine = Machine(device, num_devices)
    return MachineCost(load_shape(model), INT8, machine, expected(device.kind, INT8))


def beside(model: str, gpu: str, **asked: object) -> BeyondMemory:
    cost = plain_cost(model, gpu)
    found = beyond_memory(cost, (1, 8), 512, DEVICES, Beyond(**asked))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_layers_come_from_the_memory_of_a_gpus_host() -> None:
    found = beside("llama-3.1-70b", "rtx-4090", link=2e10)
    assert found.memory_bytes <= 18e9 and found.disk_bytes == 0 and found.in_ring > 0
    for step in found.steps:
        assert step.seconds == pytest.approx(step.copied_bytes / 2e10)
    assert found.memory_bytes + found.host_bytes > found.weight_bytes


def test_what_the_host_cannot_take_comes_from_the_disk() -> None:
    found = beside("llama-3.1-70b", "rtx-4090", host_bytes=20 << 30, disk=1e9)
    assert 0 < found.on_disk < found.in_ring and found.disk_is == "given"
    assert found.host_bytes <= 0.9 * (20 << 30)
    for step in found.steps:
        assert step.seconds == pytest.approx(step.read_bytes / 1e9)
        assert step.read_bytes == pytest.approx(found.disk_bytes)


def test_the_host_computes_experts_some_of_which_are_on_the_disk() -> None:
    whole = beside("qwen3-30b-a3b", "rtx-4090")
    assert whole.on_cpu > 0 == whole.in_ring == whole.disk_bytes
    part = beside("qwen3-30b-a3b", "rtx-4090", host_bytes=8 << 30, weight_bytes=12 << 30)
    assert part.disk_bytes > 0 == part.on_disk
    assert 0 < part.steps[0].read_bytes < part.steps[1].read_bytes < part.disk_bytes
    assert part.steps[0].seconds > whole.steps[0].seconds


def test_room_for_hot_experts_is_kept_as_a_server_keeps_it() -> None:
    cost = plain_cost("qwen3-30b-a3b", "rtx-4090")
    needs = device_needs(cost.shape, INT8)
    experts = needs.layers[0].experts
    for taken in range(4):  # quarters of a layer's experts
        budget = needs.total - 20 * experts - taken * experts // 4
        found = beside("qwen3-30b-a3b", "rtx-4090", weight_bytes=budget)
        assert budget - found.memory_bytes >= experts // 2


def test_the_needs_beside_a_gpu_are_all_weights() -> None:
    for model in ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.7-flash"):
        shape = load_shape(model)
        assert device_needs(shape, INT8).total == pytest.approx(shape.weight_bytes(INT8), rel=1e-6)


def test_what_is_asked_for_and_not_possible_is_named() -> None:
    with pytest.raises(ConfigError, match="host 'l4' is none of: epyc"):
        beside("llama-3.1-70b", "rtx-4090", host="l4")
    with pytest.raises(ConfigError, match=r"host-memory .* too little"):
        beside("llama-3.1-70b", "rtx-4090", host_bytes=1 << 20)
    with pytest.raises(ConfigError, match="need a GPU with CUDA, not here"):
        beyond_memory(cost_on(6e9, "llama-3.1-8b"), (1,), 512, DEVICES, Beyond(link=1e9))
    assert beyond_memory(plain_cost("default", "l4"), (1,), 512, DEVICES, Beyond()) is None


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight-memory-bytes: 100 GiB asked for, but rtx-4090 "):
        beside("llama-3.1-70b", "rtx-4090", weight_bytes=100 << 30)
    cost, asked = cost_on(6e9, "llama-3.1-8b"), Beyond(weight_bytes=total_memory() + 1, disk=1e9)
    with pytest.raises(ConfigError, match=r"weight-memory-bytes: .* asked for, but here has"):
        beyond_memory(cost, (1,), 512, DEVICES, asked)


def test_k_v_with_a_size_of_its_own_leaves_the_rest_to_weights() -> None:
    cost = cost_on(6e9, "llama-3.1-8b")
    found = beyond_memory(cost, (1,), 512, *PLAIN, kv_cache_bytes=3_000_000_000)
    assert found is not None and 2.7e9 < found.memory_bytes <= 3e9
    assert beyond_memory(cost, (1,), 512, *PLAIN, kv_cache_bytes=5_900_000_000) is None


def test_only_beside_a_gpu_there_is_a_column_of_copies(capsys: pytest.CaptureFixture[str]) -> None:
    found = beyond_memory(cost_on(6e9, "llama-3.1-8b"), (1,), 512, *PLAIN)
    assert found is not None
    for each, is_said in ((found, False), (beside("llama-3.1-70b", "rtx-4090"), True)):
        print_beyond(each, Console(width=120))
        assert ("copied in a step" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("machine", "asked", "message"),
    [
        (("l4", 2), Beyond(disk=1e9), "need one device, not 2xl4"),
        (("mi300x",), Beyond(disk=1e9), "need a CPU or CUDA, not mi300x"),
        (("ryzen-9950x",), Beyond(weight_bytes=9 << 30), "need disk-rate for a CPU that is not"),
    ],
)
def test_a_machine_without_such_a_way(
    machine: tuple[str, int], asked: Beyond, message: str
) -> None:
    cost = plain_cost("llama-3.1-405b", *machine)
    with pytest.raises(ConfigError, match=message):
        beyond_memory(cost, (1,), 512, DEVICES, asked)
    assert beyond_memory(cost, (1,), 512, DEVICES, Beyond()) is None
