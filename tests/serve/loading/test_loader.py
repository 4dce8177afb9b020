"""Start-up chooses dtype, pages, context and threads, and refuses invalid settings by name."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from ops.cpu import native_library
from serve import LLM, machine
from serve.config import EngineConfig
from serve.errors import ConfigError, ModelLoadError
from serve.loading.kv_sizing import size_kv
from serve.loading.model_source import _set_threads
from serve.loading.precision import resolve_precision
from serve.loading.runtime import load_runtime
from serve.machine import available_memory, usable_processors
from serve.models import ModelSpec, read_spec
from tests.support.engine.checkpoints import checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def spec():
    return read_spec(checkpoint("llama"))


def sizes(spec, token_bytes, **settings):
    return size_kv(EngineConfig(**settings), spec, [LayerGroup(token_bytes)])


def _with_heads_of(spec: ModelSpec, head_dim: int) -> ModelSpec:
    layers = [
        replace(layer, attention=replace(layer.attention, head_dim=head_dim))
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def test_pages_hold_about_sixteen_tokens(spec):
    assert sizes(spec, 512, kv_cache_bytes=64 * MIB).page_bytes == 16 << 10
    assert sizes(spec, 32 << 10, kv_cache_bytes=64 * MIB).page_bytes == 512 << 10
    assert sizes(spec, 1 << 20, kv_cache_bytes=2048 * MIB).page_bytes == 2 * MIB


@pytest.mark.parametrize(("token_bytes", "tile_tokens"), [(1056, 16), (16_896, 16), (640, 1)])
def test_a_page_holds_whole_tiles(spec, token_bytes, tile_tokens):
    group = LayerGroup(token_bytes, tile_tokens)
    sizing = size_kv(EngineConfig(kv_cache_bytes=64 * MIB), spec, [group])
    padded = sizing.groups[0].token_bytes
    assert sizing.page_bytes % 4096 == 0
    assert sizing.page_bytes % (padded * tile_tokens) == 0
    assert token_bytes <= padded <= token_bytes * 1.25


def test_pages_are_bounded_by_the_number_of_mappings(spec):
    large = sizes(spec, 512, kv_cache_bytes=8 << 30, max_num_seqs=1_000_000)
    assert large.num_pages <= 30_000
    with pytest.raises(ConfigError, match="kv_page_bytes"):
        sizes(spec, 512, kv_cache_bytes=8 << 30, kv_page_bytes=4096, max_num_seqs=1_000_000)


def test_kv_memory_is_bounded_by_what_all_sequences_can_use(spec):
    sizing = sizes(spec, 512, max_num_seqs=2, max_model_len=100)
    assert sizing.num_pages * sizing.page_bytes <= 2 * (100 * 512 + 2 * MIB)


def test_more_kv_memory_than_the_machine_has_is_refused(spec, monkeypatch):
    monkeypatch.setattr("serve.loading.kv_sizing.available_memory", lambda: 20 * MIB)
    monkeypatch.setattr("serve.loading.kv_sizing.total_memory", lambda: 64 * MIB)
    text = "kv_cache_bytes: 1 GiB asked for, .* cgroup has 64 MiB, 20 MiB of them free"
    with pytest.raises(ConfigError, match=text):
        sizes(spec, 1 << 20, kv_cache_bytes=1 << 30)
    assert sizes(spec, 512, kv_cache_bytes=1 << 30, max_num_seqs=4).num_pages, "less is used"
    config = EngineConfig(kv_cache_bytes=1 << 30)
    with pytest.raises(ConfigError, match="1 GiB asked for, but the device has 60 MiB"):
        size_kv(config, spec, [LayerGroup(1 << 20)], free_bytes=60 * MIB)


@pytest.mark.parametrize("call", ["pool", "ranges"])
def test_refused_addresses_name_the_settings(monkeypatch, call):
    """Linux refuses addresses beyond `ulimit -v`."""

    def refuse(*_):
        raise OSError(errno.ENOMEM, "mmap: Cannot allocate memory")

    method = {"pool": "__init__", "ranges": "reserve"}[call]
    monkeypatch.setattr(LinuxMemory, method, refuse)
    monkeypatch.setattr(LinuxMemory, "close", lambda _: None)
    names = {"pool": "kv_cache_bytes", "ranges": "max_num_seqs and max_model_len"}[call]
    with pytest.raises(ConfigError, match=rf"{names}: .*iB of addresses .*ulimit -v"):
        load_runtime(EngineConfig(model=str(checkpoint("llama"))))


def test_total_memory_is_that_of_the_system_or_its_cgroup(monkeypatch):
    system = machine.total_memory()
    assert machine.available_memory() <= system
    files = {"/sys/fs/cgroup/memory.max": "1048576\n"}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert machine.total_memory() == MIB
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.total_memory() >= system


def test_the_context_must_fit(spec):
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        sizes(spec, 1 << 20, kv_cache_bytes=64 * MIB)
    with pytest.raises(ConfigError, match="max_model_len 300 is above"):
        sizes(spec, 512, max_model_len=300)
    assert sizes(spec, 512, max_model_len=64).max_model_len == 64


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"kv_dtype": "int5"}, "kv_dtype"),
        ({"kv_group": 12}, "kv_group"),
        ({"weight_group": 8}, "weight_group"),
        ({"weight_group": 64.0}, "weight_group"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be at most"),
        ({"prefix_cache": "no"}, "prefix_cache"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"kv_page_bytes": 5000}, "kv_page_bytes"),
        ({"kv_page_bytes": 65536.0}, "kv_page_bytes"),
        ({"compute_threads": True}, "compute_threads"),
        ({"seed": 1.5}, "seed"),
        ({"dtype": "int8", "backend": "reference"}, "cpu or cuda back end"),
        ({"kv_dtype": "int4", "backend": "reference"}, "kv_dtype int4 needs the cpu back end"),
        ({"backend": "abacus"}, "backend"),
        ({"no_such_setting": 1}, "no_such_setting"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ConfigError, match=named):
        LLM(str(checkpoint("llama")), **settings)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def _precision(spec, **settings):
    precision = resolve_precision(EngineConfig(**settings), spec)
    return ("int8" if precision.is_int8 else str(precision.compute)), precision.kv


def test_dtype_follows_the_checkpoint(spec):
    assert _precision(spec) == ("torch.float32", "float32")
    assert _precision(spec, dtype="bfloat16") == ("torch.bfloat16", "bfloat16")
    assert _precision(spec, dtype="int8") == ("int8", "int8")
    assert _precision(spec, dtype="int8", kv_dtype="bfloat16") == ("int8", "bfloat16")
    assert _precision(spec, dtype="float32", kv_dtype="int8") == ("torch.float32", "int8")


def test_int4_kv_is_taken_only_when_asked_for(spec):
    half = replace(spec, torch_dtype="bfloat16")
    assert _precision(half, dtype="int4")[1] == "int8"
    for dtype in ("auto", "int8", "int4", "float32"):
        assert _precision(half, dtype=dtype, kv_dtype="int4")[1] == "int4"


def test_int4_kv_is_refused_where_there_are_no_kernels(spec):
    latent = read_spec(checkpoint("deepseek_v3", "yarn"))
    for model, backend, text in (
        (spec, "cuda", "kv_dtype int4 needs the cpu back end, not cuda; use auto, int8, bfloat16"),
        (latent, "cpu", "kv_dtype int4 is not available for the latents of deepseek_v3; use auto"),
        (_with_heads_of(spec, 20), "cpu", "kv_dtype int4 needs a head_dim .* not 20"),
    ):
        with pytest.raises(ConfigError, match=text):
            _precision(model, kv_dtype="int4", backend=backend)


def test_auto_takes_int8_for_16_bit_checkpoints_that_tolerate_it(spec, monkeypatch):
    half = replace(spec, torch_dtype="bfloat16")
    monkeypatch.setattr("ops.cpu.native_library.instruction_set", lambda: "avx2")
    assert _precision(half) == ("int8", "int8")
    assert _precision(replace(half, tolerates_int8=False))[0] != "int8"
    assert _precision(_with_heads_of(half, 20)) == ("int8", "bfloat16")
    monkeypatch.setattr("ops.cpu.native_library.instruction_set", lambda: "portable")
    assert _precision(half)[0] != "int8"


def test_heads_that_int8_kv_does_not_fit_have_bfloat16_kv(caplog):
    """Their K/V is not float32, which would take twice the bytes."""
    if not native_library.is_available():
        pytest.skip("native kernels not built")
    path = str(checkpoint("llama", "head-dim"))
    with caplog.at_level("INFO"), LLM(path, dtype="int8", max_model_len=64) as llm:
        (output,) = llm.generate([[5, 6, 7]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) in range(1, 17)
    assert "kv_dtype auto: bfloat16" in caplog.text


def test_unavailable_int8_is_refused(spec, monkeypatch):
    with pytest.raises(ConfigError, match="head_dim"):
        _precision(_with_heads_of(spec, 20), kv_dtype="int8")
    monkeypatch.setattr("ops.cpu.native_library.is_available", lambda: False)
    with pytest.raises(ConfigError, match="native kernels"):
        _precision(spec, dtype="int8")
    assert _precision(replace(spec, torch_dtype="bfloat16"))[0] != "int8"


def test_available_memory_is_plausible():
    assert 100 * MIB < available_memory() < 1 << 46


QUOTAS: list[tuple[dict[str, str], int]] = [
    ({}, 64),
    ({"cpu.max": "max 100000\n"}, 64),
    ({"cpu.max": "200000 100000\n"}, 2),
    ({"cpu.max": "150000 100000\n"}, 2),
    ({"cpu.max": "5000 100000\n"}, 1),
    ({"cpu.max": "12800000 100000\n"}, 64),
    ({"cpu.max": "200000 0\n"}, 64),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
]


@pytest.mark.parametrize(("files", "count"), QUOTAS)
def test_a_quota_of_processor_time_bounds_the_threads(files, count, monkeypatch):
    """With docker --cpus=2 on 64 cores, 64 threads would spin while they wait for each other."""
    under = "/sys/fs/cgroup/"
    monkeypatch.setattr("serve.machine._read", lambda path: files.get(path.removeprefix(under), ""))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert usable_processors() == count


@pytest.mark.parametrize(("setting", "expected"), [(None, 2), (1, 1), (8, 2)])
def test_the_thread_team_is_no_larger_than_the_quota(setting, expected, monkeypatch):
    """This holds even where the team already has a thread for every core."""
    team: list[int] = []
    monkeypatch.setattr("serve.loading.model_source.usable_processors", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", team.append)
    monkeypatch.setattr("ops.cpu.native_library.is_available", lambda: True)
    monkeypatch.setattr("ops.cpu.native_library.set_num_threads", team.append)
    monkeypatch.setattr("ops.cpu.native_library.num_threads", lambda: 64)
    monkeypatch.setattr("ops.cpu.native_library.instruction_set", lambda: "avx2")
    _set_threads(EngineConfig(compute_threads=setting))
    assert team == [expected, expected]


def test_kv_memory_is_freed_when_loading_fails(monkeypatch):
    """Neither a mapping nor a memfd stays open."""

    def fail(*args: object, **settings: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("serve.loading.runtime.KVManager", fail)
    before = _num_reservations()
    with pytest.raises(RuntimeError, match="no"):
        load_runtime(EngineConfig(model=str(checkpoint("llama"))))
    assert _num_reservations() == before


def _num_reservations() -> int:
    return Path("/proc/self/maps").read_text().count("mergestep-kv") + sum(
        "mergestep-kv" in str(file.resolve()) for file in Path("/proc/self/fd").iterdir()
    )


def test_bf16_generates():
    """The tokens may differ from those of fp32, so only their number is checked."""
    with LLM(str(checkpoint("llama")), dtype="bfloat16") as llm:
        (output,) = llm.generate([[5, 6, 7]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) in range(1, 17)
