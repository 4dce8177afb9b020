"""`serve plan` predicts K/V of running sequences that is in a file beyond memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plan.beyond_memory import Beyond, beyond_memory
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import expected
from bench.plan.hardware import HERE, Device, load_devices
from bench.plan.kv_beyond_memory import KVBeyondMemory, KVOffload, kv_beyond_memory
from bench.plan.run import run
from bench.plan.shapes import Precision, load_shape
from memory.attention.offloaded_layout import OffloadedKVLayout
from memory.attention.seam import AttentionLayer
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_layouts import open_selection, recent_layout
from serve.loading.kv_offload import offloaded_layout, size_offload
from serve.loading.precision import resolve_precision
from serve.models import read_spec

INT8 = Precision("int8", "int8")
MODEL = "llama-3.2-1b"
MIB, GIB = 1 << 20, 1 << 30


def cost_of(model: str = MODEL, precision: Precision = INT8, kind: str = "cpu") -> MachineCost:
    device: Device = next(each for each in load_devices(None).values() if each.kind == kind)
    device = replace(device, memory_bytes=64e9)
    return MachineCost(load_shape(model), precision, Machine(device), expected(device, precision))


def planned(
    policy: str = "off", memory: int = GIB, file: int = 7 * GIB, disk: float = 1e9
) -> KVBeyondMemory:
    return kv_beyond_memory(cost_of(), KVOffload(file, memory, policy, disk), (1, 4), (8192, 65536))


def test_tokens_are_those_of_memory_and_file_in_blocks_of_the_disk() -> None:
    found = planned()
    layout = OffloadedKVLayout([AttentionLayer(8, 8, 64, 0.125)] * 16, "int8", 64)
    assert found.token_bytes == layout.tile_bytes // 16
    page = layout.tile_bytes
    assert found.tokens == 8 * GIB // page * 16
    assert found.bounds_bytes == 0
    chosen = planned("quest:budget=12%")
    assert chosen.tokens == found.tokens
    assert 0.05 < chosen.bounds_bytes / (8 * GIB) < 0.08


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("policy", ["off", "quest:budget=12%"])
@pytest.mark.parametrize(
    "model", [EngineConfig(DEFAULT_MODEL).model_path, Path("bench/quality/model")]
)
def test_sizes_are_those_of_a_server(model: Path, policy: str, kv_dtype: str) -> None:
    config = EngineConfig(
        str(model),
        dtype="int8",
        kv_dtype=kv_dtype,
        backend="cpu",
        kv_cache_bytes=256 * MIB,
        kv_offload_bytes=64 * MIB,
        kv_policy=policy,
    )
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec, is_trial=True)
    layers = spec.attention_layers
    selection = open_selection(config, precision, layers, is_trial=True)
    layout = offloaded_layout(config, precision, layers, selection)
    recent = recent_layout(config, precision, layers)
    sizes = size_offload(config, spec, layout, recent, is_trial=True)
    cost = cost_of(str(model), Precision("int8", kv_dtype))
    asked = KVOffload(64 * MIB, 256 * MIB, policy, 1e9)
    found = kv_beyond_memory(cost, asked, (1,), (64,))
    assert found.bounds_bytes == sizes.bounds_bytes
    assert found.recent_bytes == sizes.recent_bytes
    assert found.tokens * found.token_bytes == sizes.pool_bytes
    assert found.bounds_bytes < 0.11 * sizes.pool_bytes, "pages are not padded much"
    assert (found.bounds_bytes > 0, found.recent_bytes > 0) == (policy != "off", kv_dtype == "int4")


@pytest.mark.parametrize("left", [0, 1])
def test_larger_pages_never_cost_a_sequence_its_length(left: int) -> None:
    """Those of 16 tokens have as many bytes of padding as bounds."""
    layers, tile = [AttentionLayer(2, 2, 32, 1.0)] * 4, 16 << 10
    layout = OffloadedKVLayout(layers, "int8", 64, has_bounds=True)
    memory, file = 8 * MIB, 61 * tile
    tokens = (memory + file) // tile * 16 - left * 1024
    config = EngineConfig(
        max_model_len=tokens, max_num_seqs=4, kv_cache_bytes=memory, kv_offload_bytes=file
    )
    sizes = size_offload(config, load_shape(MODEL), layout, None, is_trial=True)
    assert sizes.pages.max_model_len == tokens
    assert sizes.pages.page_bytes == (tile if left == 0 else 4 * tile)


def test_a_step_reads_what_memory_lacks_at_the_disks_rate() -> None:
    slow, fast = planned(disk=1e8), planned(disk=1e9)
    for one, other in zip(slow.steps, fast.steps, strict=True):
        whole = one.batch * one.context * slow.token_bytes
        assert one.kv_bytes == whole and one.read_bytes == other.read_bytes
        assert one.read_bytes == pytest.approx(max(0.0, whole - GIB))
        assert one.seconds - other.seconds == pytest.approx(one.read_bytes * 9e-9)
    assert slow.steps[0].held == 1.0, "8,192 tokens are in memory"
    assert slow.steps[0].read_bytes == 0.0
    assert slow.steps[0].seconds == fast.steps[0].seconds


def test_a_policy_reads_the_tiles_that_one_of_the_heads_chooses() -> None:
    (*_, whole), (*_, chosen), (*_, fewer) = (
        planned(policy).steps for policy in ("off", "quest:budget=12%", "quest:budget=6%")
    )
    for step, share in ((chosen, 0.12), (fewer, 0.06)):
        missing = 1 - step.held
        of_any = 1 - (1 - share) ** 8
        assert step.read_bytes == pytest.approx(step.kv_bytes * missing * of_any, rel=1e-3)
        assert step.held < whole.held, "the bounds are in memory, too"
    assert fewer.seconds < chosen.seconds < whole.seconds


def test_batches_that_do_not_fit_are_left_out() -> None:
    small = planned(file=GIB)
    fitting = [(step.batch, step.context) for step in small.steps]
    assert fitting == [(1, 8192), (1, 65536), (4, 8192)]
    assert len(planned(file=15 * GIB).steps) == 4


@pytest.mark.parametrize(
    ("cost", "asked", "message"),
    [
        (
            ("qwen3.5-0.8b",),
            {},
            "kv-offload-bytes cannot be used with qwen3.5-0.8b, whose layers h",
        ),
        (("gemma-3-4b",), {}, "gemma-3-4b, which has windows"),
        (("deepseek-v2-lite",), {}, "deepseek-v2-lite, which has latent K/V"),
        (
            (MODEL, Precision("int8", "bfloat16")),
            {},
            "kv-offload-bytes needs kv-dtype int8 or int4",
        ),
        ((MODEL, INT8, "gpu"), {}, "needs one machine that computes on its CPU"),
        ((), {"policy": "h2o:budget=12%"}, "kv-policy h2o cannot be used with kv-offload-bytes"),
        ((), {"policy": "quest:budget=12"}, "did you mean quest:budget=12%"),
        ((), {"disk_bytes_per_s": None}, "kv-offload-bytes needs disk-rate for a machine"),
        ((), {"memory_bytes": 1 << 20}, "kv-cache-bytes 1048576 is too little for"),
        # a layer of 8,192 tokens, as asked about, would have room
        ((), {"memory_bytes": 64 * MIB}, r"kv-cache-bytes .*: a layer of 5\d{4} tokens takes 8"),
        (
            (),
            {"memory_bytes": 1 << 40},
            "kv-cache-bytes: 1 TiB asked for, but the machine has 59.6",
        ),
        ((), {"memory_bytes": 59 * GIB}, r"kv-cache-bytes 59 GiB beside weights of 1\..* has 59.6"),
        ((), {"max_model_len": 1 << 18}, "max-model-len 262144 is above the model's 131072"),
    ],
)
def test_what_cannot_be_is_refused_by_name(cost, asked, message) -> None:  # type: ignore[no-untyped-def]
    options = {"memory_bytes": GIB, "disk_bytes_per_s": 1e9} | asked
    with pytest.raises(ConfigError, match=message):
        kv_beyond_memory(cost_of(*cost), KVOffload(GIB, **options), (1,), (8192,))


def test_a_folder_that_a_server_would_not_make_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cost = cost_of()
    here = replace(cost.machine.device, name=HERE)
    cost = MachineCost(cost.shape, INT8, Machine(here), cost.efficiency)
    asked = KVOffload(GIB, GIB, folder=Path("/no/such"))
    with pytest.raises(ConfigError, match="kv-offload-dir /no/such: there is no directory /no"):
        kv_beyond_memory(cost, asked, (1,), (8192,))
    (tmp_path / "file").touch()
    file = replace(asked, folder=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"kv-offload-dir .*/file is no directory"):
        kv_beyond_memory(cost, file, (1,), (8192,))
    monkeypatch.setattr(
        "bench.common.random_reads.disk_rate",
        lambda folder, unit, in_order: 5e8 if in_order else 4e8,
    )
    for policy, rate in (("off", 5e8), ("quest:budget=12%", 4e8)):
        new = replace(asked, policy=policy, folder=tmp_path / "new")
        found = kv_beyond_memory(cost, new, (1,), (8192,))
        assert found.disk_bytes_per_s == rate and found.is_measured
    assert not (tmp_path / "new").exists(), "it is measured where a server would make it"


def test_the_plan_says_it_of_one_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    offload = KVOffload(7 * GIB, GIB, "quest:budget=12%", 5e8)
    file, [machine] = tmp_path / "plan.json", [cost_of().machine.name]
    run(MODEL, machines=[machine], batches=[4], offload=offload, json_file=file)
    said = " ".join(capsys.readouterr().out.split())
    found = json.loads(file.read_text())["kv_beyond_memory"]
    assert f"K/V beyond memory: {found['tokens']:,} tokens of all sequences in 1.07 GB" in said
    assert "0.5 GB/s (given)" in said
    assert [step["batch"] for step in found["steps"]] == [4] * len(found["steps"])
    with pytest.raises(ConfigError, match="kv-offload-bytes needs exactly one machine"):
        run(MODEL, offload=offload)


def test_what_is_refused_is_refused_before_any_table(capsys: pytest.CaptureFixture[str]) -> None:
    [machine] = [cost_of().machine.name]
    with pytest.raises(ConfigError, match="needs disk-rate"):
        run(MODEL, machines=[machine], batches=[4], offload=KVOffload(GIB, GIB))
    assert capsys.readouterr().out == ""


def test_int4_takes_fewer_bytes_and_memory_for_recent_tokens() -> None:
    cost, asked = cost_of(precision=Precision("int8", "int4")), KVOffload(7 * GIB, GIB, "off", 1e9)
    asked = replace(asked, max_num_seqs=8)
    found = kv_beyond_memory(cost, asked, (1, 4), (8192,))
    assert found.token_bytes / planned().token_bytes == pytest.approx(0.6)
    assert found.recent_bytes == (8 * 256 + 256) * cost_of().shape.kv_token_bytes(INT8)
    page = 16 * found.token_bytes * 2
    assert found.tokens == (8 * GIB - found.recent_bytes) // page * 32
    with pytest.raises(
        ConfigError, match=r"max-num-seqs sequences \(.* lower max-num-seqs, kv-off"
    ):
        kv_beyond_memory(cost, replace(asked, max_num_seqs=None), (1, 4), (8192,))


def test_only_what_the_server_runs_at_once_is_planned() -> None:
    asked = KVOffload(7 * GIB, GIB, "off", 1e9, max_num_seqs=4, max_model_len=8192)
    found = kv_beyond_memory(cost_of(), asked, (1, 4, 8), (4096, 8192))
    assert [(step.batch, step.context) for step in found.steps] == [(1, 4096), (4, 4096)]
    assert found.tokens < 5 * 8192, "more is not taken than these can use"


def test_weights_beyond_memory_are_read_in_the_same_steps() -> None:
    cost = cost_of()
    weights = beyond_memory(cost, (1, 4), 8192, {}, Beyond(weight_bytes=GIB, disk=1e9))
    assert weights is not None and weights.steps[0].read_bytes > 0
    asked = KVOffload(7 * GIB, GIB, "off", 1e9)
    plain, both = (
        kv_beyond_memory(cost, asked, (1, 4), (8192, 65536), each) for each in (None, weights)
    )
    assert both.weights_are_read and not plain.weights_are_read
    for one, other in zip(plain.steps, both.steps, strict=True):
        assert one.read_bytes == other.read_bytes
        computed = one.seconds - one.read_bytes / 1e9
        read_s = weights.steps[0].read_bytes / 1e9
        assert other.seconds == pytest.approx(max(computed, read_s) + one.read_bytes / 1e9)
        assert other.seconds > one.seconds


def test_k_v_takes_its_share_of_what_the_weights_leave() -> None:
    asked, cost = KVOffload(7 * GIB, None, "off", 1e9), cost_of()
    left = 64e9 - cost.shape.weight_bytes(INT8)
    assert kv_beyond_memory(cost, asked, (1,), (8192,)).memory_bytes == int(0.4 * left)
