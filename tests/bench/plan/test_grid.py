"""The cost of a grid, by hand-computed steps and by what more work or more devices must do."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import Efficiency, expected
from bench.plan.grid import Grid, GridCost, GridWork, chunk_work, decode_work
from bench.plan.hardware import Device, Link, load_devices
from bench.plan.shapes import Precision, load_shape, make_shape
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork

# 4 layers; K and V of a token are 2 x 2 x 8 numbers a layer, and q is 4 x 8
SHAPE = make_shape(
    "tiny",
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=100,
    context=1000,
    windows=[None] * 4,
    is_tied=False,
)
PRECISION = Precision("bfloat16", "bfloat16")
DEVICE = Device(
    name="unit",
    kind="gpu",
    memory_bytes=1e9,
    bytes_per_s=1e6,
    operations={"bf16": 1e9},
    peers=Link(1e6, 1.0),
    network=Link(1e5, 0.5),
)
FULL = Efficiency()


def cost(grid: Grid, device: Device = DEVICE, **options: float) -> GridCost:
    options = {"exchange_s": 0.25, "server_devices": 2} | options
    return GridCost(SHAPE, PRECISION, device, grid, FULL, **options)


def test_one_device_is_that_of_a_machine() -> None:
    """A grid of one adds nothing to a decode step, and to a prompt only the K/V before it."""
    shape = load_shape("llama-3.1-8b")
    for name, dtype in (("h100-sxm", "bfloat16"), ("epyc-9755", "int8")):
        device, precision = load_devices()[name], Precision(dtype, dtype)
        efficiency = expected(device.kind, precision)
        machine = MachineCost(shape, precision, Machine(device), efficiency)
        grid = GridCost(shape, precision, device, Grid(), efficiency)
        decode = StepWork(3, 3000, 3, samples=True)
        assert grid.pass_seconds(decode_work(500, 1000, 1500)) == pytest.approx(
            machine.seconds(decode)
        )
        prompt = StepWork()
        prompt.add(512, 1024)
        assert grid.pass_seconds(chunk_work(512, 1024)) == pytest.approx(machine.seconds(prompt))


def test_a_small_chunk_reads_the_context_before_it() -> None:
    """32 bytes x 4 a token and layer: 2 rows multiply 4 x 32 for each token, which is less."""
    layer = cost(Grid()).layer_seconds(chunk_work(2, 1000))
    # K and V: 2 x 2 heads x 8 x 2 bytes = 64 bytes a token
    assert layer["attention"] == pytest.approx(1002 * 64 / 1e6)
    assert layer["attention"] > 4 * 32 * 2 * 1001 / 1e9
    many = cost(Grid()).layer_seconds(chunk_work(900, 1000))
    # 900 rows on 1,000 tokens before them and half of their own
    assert many["attention"] == pytest.approx(max(1900 * 64 / 1e6, 4 * 32 * 900 * 1450 / 1e9))


def test_tensor_parallel_devices_gather_four_times_a_layer() -> None:
    """A row gathers q (32) + hidden (32) twice + up (64) numbers of 2 bytes, half of them from
    the other device."""
    one, two = (cost(Grid(tp)).layer_seconds(decode_work(100)) for tp in (1, 2))
    assert one["gathers"] == 0.0
    assert two["gathers"] == pytest.approx(4 * 3e-6 + (32 + 64 + 64) * 2 / 2 / 1e6)
    for name in ("products", "attention"):
        assert two[name] == pytest.approx(one[name] / 2), name


def test_processes_of_one_machine_gather_without_bytes() -> None:
    device = replace(DEVICE, kind="cpu", peers=None, network=None)
    seconds = [
        cost(Grid(2), device).layer_seconds(chunk_work(rows, 0))["gathers"] for rows in (2, 9)
    ]
    assert seconds == pytest.approx([4 * 10e-6] * 2)


def test_a_hop_moves_the_hidden_state() -> None:
    """32 numbers of 4 bytes a row: over the peers' link within a server, else the network."""
    assert cost(Grid()).hop_seconds(10) == 0.0
    assert cost(Grid(1, 2)).hop_seconds(10) == pytest.approx(1.0 + 10 * 128 / 1e6)
    assert cost(Grid(1, 3)).hop_seconds(10) == pytest.approx(0.5 + 10 * 128 / 1e5)
    # each of two devices sends its half, and the next stage gathers the whole
    both = 0.5 + 10 * 64 / 1e5 + 3e-6 + 10 * 64 / 1e6
    assert cost(Grid(2, 2)).hop_seconds(10) == pytest.approx(both)


def test_stages_divide_the_layers_and_the_last_has_the_head() -> None:
    whole = cost(Grid()).stage_seconds(decode_work(100))
    split = cost(Grid(1, 3)).stage_seconds(decode_work(100))
    assert cost(Grid(1, 3)).stage_layers == [2, 1, 1]
    assert sum(split) == pytest.approx(whole[0])
    assert split[0] == pytest.approx(2 * split[1]) and split[2] > split[1]
    unsampled = cost(Grid(1, 3)).stage_seconds(chunk_work(1, 100))
    assert unsampled[2] == pytest.approx(unsampled[1])
    head = 32 * 100 * 2 / 1e6  # the weights, in bf16
    assert split[2] - split[1] == pytest.approx(head)


def test_stages_may_be_given() -> None:
    grid = GridCost(SHAPE, PRECISION, DEVICE, Grid(1, 2), FULL, stage_layers=(1, 3))
    first, second = grid.stage_seconds(chunk_work(4, 100))
    assert second == pytest.approx(3 * first)
    with pytest.raises(ConfigError, match=r"stage_layers \[4\] are not 2 stages of 4 layers"):
        GridCost(SHAPE, PRECISION, DEVICE, Grid(1, 2), FULL, stage_layers=(4,))


def test_holders_read_their_segments_at_the_same_time() -> None:
    """1,000 tokens in segments of 400: two holders have 400 tokens, the last one has 201."""
    held = cost(Grid(1, 1, 3), segment_tokens=400).layer_seconds(decode_work(1000))
    alone = cost(Grid()).layer_seconds(decode_work(400 - 1))
    assert held["attention"] == pytest.approx(alone["attention"])
    # two holders send 32 + 4 fp32 numbers of a row, which are written and read
    partial = 2 * (32 + 4) * 4
    assert held["exchange"] == pytest.approx(0.25 + partial / 1e5)
    wide = cost(Grid(1, 1, 3), segment_tokens=inf).layer_seconds(decode_work(1000))
    assert wide["exchange"] == 0.0
    last = cost(Grid(1, 1, 2), segment_tokens=400).layer_seconds(decode_work(1000))
    assert last["attention"] == pytest.approx(601 / 400 * held["attention"])


def test_short_sequences_stay_on_the_first_holder() -> None:
    """Beside a long sequence, short ones add to the holder that has the first tokens."""
    grid = cost(Grid(1, 1, 2), segment_tokens=500)
    alone = grid.layer_seconds(decode_work(999))
    beside = grid.layer_seconds(decode_work(999, 99, 49))
    token_s = 64 / 1e6
    assert beside["attention"] - alone["attention"] == pytest.approx(150 * token_s)
    assert beside["exchange"] == pytest.approx(alone["exchange"])


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(2, 3, 1), Grid(2, 2, 4), Grid(1, 4, 2)])
def test_more_work_never_takes_less_time(grid: Grid) -> None:
    one = cost(grid, segment_tokens=200)
    contexts = [one.pass_seconds(decode_work(n)) for n in (1, 100, 199, 200, 400, 1600)]
    assert contexts == sorted(contexts)
    rows = [one.pass_seconds(chunk_work(n, 300)) for n in (1, 2, 16, 64, 200)]
    assert rows == sorted(rows)
    mixed = [one.pass_seconds(chunk_work(16, 300, (90,) * n)) for n in range(4)]
    assert mixed == sorted(mixed)


def test_more_devices_take_less_time_on_a_long_context() -> None:
    """Each number of the grid has its own way to be faster: both kinds of K/V division shorten a
    step, and stages the time in which one of them is busy."""
    shape, device = load_shape("llama-3.1-8b"), load_devices()["h100-sxm"]

    def found(grid: Grid) -> GridCost:
        segment = 4_000_000 / grid.kvp
        return GridCost(shape, PRECISION, device, grid, FULL, segment_tokens=segment)

    work = decode_work(4_000_000)
    by_tp = [found(Grid(tp)).pass_seconds(work) for tp in (1, 2, 4, 8)]
    by_kvp = [found(Grid(8, 1, kvp)).pass_seconds(work) for kvp in (1, 2, 4)]
    stages = [max(found(Grid(8, spp)).stage_seconds(work)) for spp in (1, 2, 8, 16)]
    assert by_tp == sorted(by_tp, reverse=True) and by_kvp == sorted(by_kvp, reverse=True)
    assert stages == sorted(stages, reverse=True)
    assert found(Grid(8, 16)).pass_seconds(work) > found(Grid(8, 1)).pass_seconds(work)


def test_a_step_without_rows_takes_no_time() -> None:
    assert cost(Grid(2, 2)).stage_seconds(GridWork()) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("grid", "device", "message"),
    [
        (Grid(4), DEVICE, "tp 4 is more than the 2 devices of a server"),
        (Grid(1, 5), DEVICE, "pp 5 is more than the 4 layers"),
        (Grid(1, 2), replace(DEVICE, peers=None), "no peers for unit"),
        (Grid(1, 3), replace(DEVICE, network=None), "no network for unit"),
    ],
)
def test_grids_that_do_not_fit(grid: Grid, device: Device, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost(grid, device)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="tp 4 does not divide 4 heads, 2 of K/V"):
        cost(Grid(4), server_devices=8)
    with pytest.raises(ConfigError, match="pp must be at least 1, not 0"):
        Grid(1, 0)
