"""Shapes, devices and the cost of a step: published counts, formulas by hand, and monotonicity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.checkpoint_shapes import SHAPES
from bench.common.checkpoints import random_checkpoint
from bench.plan.capacity import sequence_bytes
from bench.plan.cost import Machine, MachineCost, all_reduce_s
from bench.plan.efficiency import BOUND, Efficiency, expected
from bench.plan.hardware import Device, Link, load_devices
from bench.plan.run import find_precision
from bench.plan.shapes import KV, WEIGHTS, Precision, known_models, load_shape, make_shape
from memory.attention.layouts import make_layout
from serve.config import DEFAULT_MODEL, default_model_path
from serve.errors import ConfigError, ModelLoadError
from serve.models import read_spec
from serve.scheduler.step_time import StepWork
from tests.support.profile import examples

# Counts of the authors (model cards; "total parameters" of the published checkpoints).
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-small-24b": 23_572_403_200,
    "gpt2": 124_439_808,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
    "phi-4-mini": 3_836_021_760,
    # without the vision tower (416,866,032) and its projector (2,950,272)
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 2_950_272,
}
# Counts that the authors give in billions, total and active, without towers and further heads.
ROUNDED = {
    "gemma-4-26b-a4b": (25.2, 3.8),
    "glm-4.7-flash": (29.9, 3.9),
    "lfm2-1.2b": (1.17, 1.17),
    "ministral-3-8b": (8.5, 8.5),
    "qwen3-30b-a3b": (30.5, 3.35),
    # without what sees pictures
    "qwen3.5-0.8b": (0.75, 0.75),
    "qwen3.5-4b": (4.2, 4.2),
    "qwen3.5-9b": (8.95, 8.95),
}
# 1 TB/s, 100 TFLOP/s in bf16, 200 in int8, 10 in fp32
ROUND = Device(
    name="round",
    kind="gpu",
    memory_bytes=100e9,
    bytes_per_s=1e12,
    operations={"bf16": 1e14, "int8": 2e14, "fp32": 1e13},
    cache_bytes=1e6,
    peers=Link(1e11, 1e-5),
)
# 1,000 parameters in each of 2 layers, 160 in the head; q of 20, k of 10
SMALL = replace(
    make_shape(
        "small",
        hidden=10,
        heads=2,
        kv_heads=1,
        head_dim=10,
        ffn=0,
        vocab=16,
        context=100,
        windows=[None, None],
        is_tied=False,
    ),
    block_parameters=2000,
)
BF16 = Precision()
DECODES = StepWork(num_decodes=4, num_context=396, num_rows=4, samples=True)
CHUNK = StepWork(num_rows=8, num_pairs=100, num_chunks=1)
ALL_DEVICES = load_devices()


def cost_of(
    efficiency: Efficiency = BOUND, *, number: int = 1, precision: Precision = BF16
) -> MachineCost:
    return MachineCost(SMALL, precision, Machine(ROUND, number), efficiency)


# ---- shapes


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_published_parameters(name: str) -> None:
    assert load_shape(name).num_parameters == PARAMETERS[name]


def test_all_named_models_are_counted() -> None:
    assert set(known_models()) == {*PARAMETERS, *ROUNDED, DEFAULT_MODEL}


def test_names_are_found_in_any_case() -> None:
    assert load_shape("Llama-3.1-8B") == load_shape("llama-3.1-8b")


@pytest.mark.parametrize("name", ROUNDED)
def test_published_billions(name: str) -> None:
    shape, (total, active) = load_shape(name), ROUNDED[name]
    assert shape.num_parameters / 1e9 == pytest.approx(total, abs=0.05)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.05)


def test_the_embedded_model_is_its_own_checkpoint() -> None:
    """The table and config.json agree, and K/V has the engine's layout."""
    named, read = load_shape("default"), load_shape(str(default_model_path()))
    assert replace(read, name="default") == named
    assert load_shape(str(default_model_path() / "config.json")) == read
    layers = read_spec(default_model_path()).attention_layers
    laid_out = {kind: make_layout(layers, kind, 64).token_bytes for kind in KV}
    assert {kind: named.kv_token_bytes(Precision("float32", kind)) for kind in KV} == laid_out


def test_int4_kv_is_for_cpus_and_never_taken_by_itself() -> None:
    shape, devices = load_shape("llama-3.2-1b"), load_devices()
    assert find_precision("int4", "auto", shape).kv == "int8"
    precision = find_precision("int8", "int4", shape)
    assert shape.kv_token_bytes(precision) == 16 * 8 * (64 + 8)  # 4 bits, and 2 bytes for 32
    cpu = devices["zen5-2vcpu"]
    int4, int8 = (
        shape.kv_token_bytes(precision),
        shape.kv_token_bytes(replace(precision, kv="int8")),
    )
    assert sequence_bytes(shape, precision, 100) == 100 * (int4 + int8)
    assert sequence_bytes(shape, precision, 10_000) == 10_000 * int4 + 128 * int8
    cost = MachineCost(shape, precision, Machine(cpu), expected(cpu.kind, precision))
    assert cost.attention.decode(1, 10_000).memory_s > 0
    with pytest.raises(ConfigError, match="h100-sxm: K/V in int4 is for CPUs"):
        MachineCost(shape, precision, Machine(devices["h100-sxm"]), BOUND)


def test_a_checkpoint_of_which_the_bytes_are_known(tmp_path: Path) -> None:
    """The file of a random checkpoint has two bytes for each parameter, and a header."""
    path = random_checkpoint("tiny", folder=tmp_path)
    shape = load_shape(str(path))
    file_bytes = (path / "model.safetensors").stat().st_size
    assert 0 < file_bytes - 2 * shape.num_parameters < 4096
    assert shape.num_layers == SHAPES["tiny"]["num_hidden_layers"]


def test_windows_are_read(tmp_path: Path) -> None:
    path = random_checkpoint("tiny", folder=tmp_path, has_weights=False)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mistral", "sliding_window": 128}
    (path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(path)).windows == (128, 128)
    assert load_shape("mistral-7b-v0.1").windows == (4096,) * 32


def test_bytes_of_weights() -> None:
    """Llama-3.1-8B has 16 GB in bf16; in int8 half of them and a bf16 table of embeddings."""
    shape = load_shape("llama-3.1-8b")
    table = 128256 * 4096
    norms = 65 * 4096
    assert shape.weight_bytes(Precision("bfloat16")) == 2 * shape.num_parameters + 2 * norms
    assert shape.weight_bytes(Precision("int8")) == shape.num_parameters + table + 3 * norms
    four = shape.weight_bytes(Precision("int4", weight_group=64))
    blocks = shape.num_parameters - 2 * table - norms
    assert four == blocks * (4 + 0.25) / 8 + table + 2 * table + 4 * norms
    tied = load_shape("llama-3.2-1b")
    assert tied.weight_bytes(BF16) == pytest.approx(2 * tied.num_parameters, rel=1e-3)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_precision_has_a_cost(weights: str) -> None:
    cost = MachineCost(
        load_shape("llama-3.2-1b"), Precision(weights), Machine(ALL_DEVICES["h100-sxm"]), BOUND
    )
    assert cost.seconds(DECODES) > 0


def test_unknown_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'llama-9' is neither a directory .* llama-3.1-8b"):
        load_shape("llama-9")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="head_dim of a multiple of 16 up to 512, not 10"):
        SMALL.kv_token_bytes(Precision("int8", "int8"))


# ---- hardware


def test_the_table_of_devices() -> None:
    """Peak rates are those of dense matrices: no peak is twice as high by mistake."""
    assert ALL_DEVICES["h100-sxm"].operations["bf16"] == 989e12
    assert ALL_DEVICES["h100-sxm"].bytes_per_s == 3.35e12
    assert ALL_DEVICES["h200"].memory_bytes == 141e9
    for device in ALL_DEVICES.values():
        types = device.operations
        assert types["fp32"] <= types["bf16"] <= types["int8"], device.name
        assert types["int8"] <= 4.1 * types["bf16"], device.name
        assert device.bytes_per_s < 1e13 and device.memory_bytes < 1e12, device.name
        if device.kind == "gpu":
            assert device.peers is not None, device.name


def test_a_users_file_adds_and_changes(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[h200]\nusd_per_h = 2.5\n\n[mine]\nkind = "cpu"\nmemory_gb = 64\nbandwidth_gb_s = 100\n'
        "fp32_tops = 2\nnetwork = { gb_s = 1.25, us = 50 }\n"
    )
    found = load_devices(file)
    assert found["h200"] == replace(ALL_DEVICES["h200"], dollars_per_h=2.5)
    assert set(found) == {*ALL_DEVICES, "mine"}
    mine = found["mine"]
    assert (mine.bytes_per_s, mine.memory_bytes) == (100e9, 64e9)
    assert mine.network == Link(1.25e9, 50e-6) and mine.peers is None
    assert mine.dollars_per_h is None and mine.operations == {"fp32": 2e12}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[h200]\nprice = 1\n", r"\[h200\] has an unknown key price"),
        ("[h200]\nusd_per_h = 0\n", r"\[h200\] usd_per_h must be a number above 0, not 0"),
        ('[h200]\nusd_per_h = "2"\n', "usd_per_h must be a number above 0, not '2'"),
        ("[h200]\npeers = 5\n", r"\[h200\] peers must be \{ gb_s = ..., us = ... \}, not 5"),
        ("[new]\nmemory_gb = 1\n", r"\[new\] kind must be one of gpu, cpu"),
        ('[new]\nkind = "cpu"\nmemory_gb = 1\n', "needs fp32_tops or bf16_tops"),
        ('[new]\nkind = "cpu"\nfp32_tops = 1\n', "memory_gb must be a number above 0, not None"),
        ("h200 = 1\n", r"h200 must be a section \[h200\]"),
        ('[h200]\nbackend = "rocm"\n', r"\[h200\] backend must be one of cpu, cuda, none"),
        ("[h200]\nmeasured = 1\n", r"\[h200\] measured must be true or false, not 1"),
        ("[h200\n", "line 1"),
    ],
)
def test_mistakes_in_a_users_file(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_devices(file)
    assert "own.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware .*none.toml: No such file"):
        load_devices(tmp_path / "none.toml")


# ---- a step


def test_a_decode_step_by_hand() -> None:
    """A layer reads 400 tokens of 40 bytes of K/V, from memory but for the cached bytes."""
    read = (2000 + 160) * 2 + 400 * 2 * 40
    assert cost_of().resources(DECODES)["memory"] == 0.0, "less than the cache holds"
    multiplied = 2 * (2000 + 160) * 4 + 4 * 20 * 400 * 2
    assert cost_of().resources(DECODES)["compute"] == pytest.approx(multiplied / 1e14)
    uncached = MachineCost(SMALL, BF16, Machine(replace(ROUND, cache_bytes=0)), BOUND)
    assert uncached.resources(DECODES)["memory"] == pytest.approx(read / 1e12)
    assert uncached.seconds(DECODES) == pytest.approx(read / 1e12)
    assert uncached.binds(DECODES) == "memory"


def test_a_chunk_by_hand() -> None:
    """No token is sampled, so the last product is left out; pairs cost 4 x 20 in 2 layers."""
    stages = {stage.name: stage for stage in cost_of(BOUND).stages(CHUNK)}
    assert stages["products"].compute_s == pytest.approx(2 * 2000 * 8 / 1e14)
    assert stages["products"].memory_s == pytest.approx(4000 / 1e12)
    assert stages["last product"].seconds == 0
    assert stages["prefill attention"].seconds == pytest.approx(4 * 20 * 2 * 100 / 1e14)
    sampled = replace(CHUNK, samples=True)
    assert cost_of().stages(sampled)[1].compute_s == pytest.approx(2 * 160 / 1e14)


def test_expected_is_the_sum_of_its_stages() -> None:
    shares = Efficiency(
        weights=0.5, kv=0.25, products=((1, 0.5),), decode=0.5, prefill=0.5, rows=1.0, step_s=1e-6,
        layer_s=1e-7, sequence_s=1e-8,
    )  # fmt: skip
    stages = {stage.name: stage.seconds for stage in cost_of(shares).stages(DECODES)}
    assert stages["products"] == pytest.approx(2 * 4000 / 1e12)
    assert stages["decode attention"] == pytest.approx(4 * 400 * 2 * 40 / 1e12)
    elements = 4 * 10 + 2 * 20 + 2 * 10
    logits = 2 * 4 * 16 * 4
    assert stages["rows"] == pytest.approx((4 * 2 * elements * 2 + logits) / 1e12)
    assert stages["overheads"] == pytest.approx(1e-6 + 2e-7 + 4e-8)
    assert cost_of(shares).seconds(DECODES) == pytest.approx(sum(stages.values()))


def test_several_devices_share_and_reduce() -> None:
    """Each of two devices has half of the weights; both have the K/V head; a layer has two
    all-reduces."""
    stages = {stage.name: stage for stage in cost_of(Efficiency(), number=2).stages(DECODES)}
    assert stages["products"].memory_s == pytest.approx(4000 / 2e12)
    assert stages["decode attention"].memory_s == pytest.approx(400 * 2 * 40 / 1e12)
    assert stages["decode attention"].compute_s == pytest.approx(4 * 20 * 400 * 2 / 2e14)
    one = all_reduce_s(4 * 10 * 2, 2, Link(1e11, 1e-5))
    assert one == pytest.approx(4 * 10 * 2 / 1e11)
    assert stages["network"].seconds == pytest.approx(4 * (one + 1e-5))
    lone = replace(ROUND, peers=None)
    with pytest.raises(ConfigError, match="2xround: hardware has no peers for round"):
        MachineCost(SMALL, BF16, Machine(lone, 2), BOUND)


def test_windows_bound_what_is_seen() -> None:
    """One of two layers has a window of 10 tokens: 4 rows attend to 40 and not 400, chunks to 80
    of 100."""
    windowed = replace(SMALL, windows=(10, None))
    cost = MachineCost(windowed, BF16, Machine(ROUND), BOUND)
    stages = {stage.name: stage for stage in cost.stages(DECODES)}
    assert stages["decode attention"].memory_s == pytest.approx(440 * 40 / 1e12)
    stages = {stage.name: stage for stage in cost.stages(CHUNK)}
    assert stages["prefill attention"].compute_s == pytest.approx(4 * 20 * 180 / 1e14)


def test_products_take_the_best_type_there_is() -> None:
    """int8 multiplies in int8 or else in bf16, and fp8 only on devices that have it."""
    int8 = Precision("int8")
    with_int8 = cost_of(precision=int8).stages(CHUNK)[0].compute_s
    without = replace(ROUND, operations={"bf16": 1e14})
    cost = MachineCost(SMALL, int8, Machine(without), BOUND)
    assert cost.stages(CHUNK)[0].compute_s == 2 * with_int8
    with pytest.raises(ConfigError, match="round does not multiply fp8"):
        cost_of(precision=Precision("fp8"))


def test_shares_of_products_by_rows() -> None:
    """Rows over share rise along straight lines; 16 rows at a half and 32 at 1 both cost 32."""
    curve = Efficiency(products=((16, 0.5), (32, 1.0)))
    assert [curve.product_rows(rows) for rows in (0, 8, 16, 24, 32, 64)] == [0, 16, 32, 32, 32, 64]
    bent = Efficiency(products=((16, 0.5), (48, 0.75)))
    assert bent.product_rows(32) == pytest.approx(48)


works = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9000)), min_size=1, max_size=6)
costs = [
    MachineCost(load_shape(model), precision, Machine(ALL_DEVICES[device], number), efficiency)
    for model, precision in (
        ("llama-3.2-1b", Precision("int8", "int8")),
        ("mistral-7b-v0.1", Precision("bfloat16")),
        ("qwen3-0.6b", Precision("nf4", "int8")),
    )
    for device, number in (("zen5-2vcpu", 1), ("l4", 2), ("h100-sxm", 8))
    for efficiency in (BOUND, expected(ALL_DEVICES[device].kind, precision))
]


@examples(150)
@given(st.sampled_from(costs), works, st.integers(1, 300), st.integers(0, 9000), st.booleans())
def test_more_work_never_takes_less(
    cost: MachineCost, parts: list[tuple[int, int]], rows: int, context: int, samples: bool
) -> None:
    work = StepWork(samples=samples)
    for own, before in parts:
        work.add(own, before)
    before_s = cost.seconds(work)
    work.add(rows, context)
    assert cost.seconds(work) >= before_s * (1 - 1e-12)


@examples(100)
@given(st.sampled_from(range(0, len(costs), 2)), works, st.booleans())
def test_nothing_beats_the_bound(index: int, parts: list[tuple[int, int]], samples: bool) -> None:
    work = StepWork(samples=samples)
    for own, before in parts:
        work.add(own, before)
    bound, usual = costs[index], costs[index + 1]
    assert 0 < bound.seconds(work) <= usual.seconds(work)
    assert usual.seconds(work) == pytest.approx(sum(usual.resources(work).values()))
    assert bound.seconds(StepWork()) == usual.seconds(StepWork()) == 0.0
