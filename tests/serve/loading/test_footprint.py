"""What a model takes before it is loaded: against what its layers hold once it is, and refusals."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.common.checkpoints import random_checkpoint, write_random
from memory.attention import cuda as cuda_attention
from ops import LinearOp, get_backend
from ops.cpu import native_library
from quant.formats.read import read_format
from serve.config import EngineConfig
from serve.errors import ConfigError, ModelLoadError
from serve.loading import footprint as module
from serve.loading import model_source
from serve.loading.footprint import check_weights_fit, footprint, weight_bytes
from serve.loading.precision import Precision, resolve_precision
from serve.loading.runtime import load_runtime
from serve.models import ModelSpec, count_parameters, read_spec
from serve.models.checkpoint import Checkpoint
from serve.models.packed import bytes_in_memory
from tests.bench.common.test_checkpoints import SMALL
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.quantized import ALL_CASES

needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="packed sizes are those of the kernels"
)
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}


def packed_bytes(found: Any, seen: set[int]) -> int:
    """Returns the bytes of all packed products below an object."""
    if id(found) in seen or isinstance(found, torch.Tensor | str | int | float | ModelSpec):
        return 0
    seen.add(id(found))
    if isinstance(getattr(found, "size_bytes", None), int):
        return int(found.size_bytes)
    if isinstance(found, list | tuple):
        return sum(packed_bytes(each, seen) for each in found)
    names = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    names += list(getattr(found, "__dict__", {}))
    return sum(packed_bytes(getattr(found, name, None), seen) for name in names)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gptq", "int8"),
        ("mxfp4", "int8"),
        ("llama", "int8"),
        ("llama", "int4"),
        ("llama", "bfloat16"),
        ("plain", "int8"),
        ("plain", "int4"),
    ],
)
def test_the_bytes_of_products_are_those_of_the_loaded_model(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    settings = SMALL["gptq" if kind == "plain" else kind] | WIDE
    if kind == "plain":
        del settings["quantization_config"]
    write_random(tmp_path, settings, "test", has_weights=True)
    config = EngineConfig(str(tmp_path), dtype=dtype, kv_cache_bytes=1 << 22)
    spec = read_spec(tmp_path)
    found = weight_bytes(config, spec, resolve_precision(config, spec), Checkpoint(tmp_path))
    runtime = load_runtime(config)
    try:
        held = packed_bytes(runtime.model.weights, set())
    finally:
        runtime.memory.close()
    assert found.blocks + found.experts + found.head == pytest.approx(held, rel=0.04)
    assert found.tables == spec.vocab_size * spec.hidden_size * 2


@needs_kernels
@pytest.mark.parametrize("case", ["hqq4", "awq", "w4a16-order", "nvfp4", "bnb-nf4", "fp8-output"])
def test_packed_products_take_what_their_format_says(case: str, tmp_path: Path) -> None:
    """The offsets of HQQ are fp16 in the file already, and were counted as packed ones."""
    config, quantize = ALL_CASES[case]
    tensors = quantize("model.layers.0.p", torch.randn(512, 1024))[0]
    save_file(tensors, tmp_path / "model.safetensors")
    files = Checkpoint(tmp_path)
    form = read_format(config).of(files.entries, "model.layers.0.p", 1024, 512)
    assert form is not None
    found = sum(bytes_in_memory(form, name, entry) for name, entry in files.entries.items())
    held = form.load(files.fetch, ["model.layers.0.p"]).linear(None)
    assert found == pytest.approx(packed_bytes(held, set()), rel=0.02)


def test_experts_take_memory_beside_their_weights() -> None:
    """Rows of up to 8,192 pairs stay in memory, and the ends of slabs are not used."""
    config = EngineConfig(str(checkpoint("mixtral")), dtype="int8", max_num_batched_tokens=8192)
    spec = read_spec(config.model_path)
    precision = Precision(torch.float32, "int8", "int8")
    weights = module.WeightBytes(experts=float(12 * 3 << 20))  # 12 experts, two parts each
    found = module.expert_scratch_bytes(config, spec, precision, weights)
    assert found == 8192 * (64 + 3 * 96) + (36 << 20) * 2 / 64
    assert not module.expert_scratch_bytes(
        config, spec, replace(precision, backend="cuda"), weights
    )


def test_a_quantized_checkpoint_takes_its_bits(tmp_path: Path) -> None:
    """4 bits and a scale for each group; unpacked it takes those of the type."""
    write_random(tmp_path, SMALL["gptq"] | WIDE, "test", has_weights=True)
    spec = read_spec(tmp_path)
    config = EngineConfig(str(tmp_path))
    counts, files = count_parameters(spec), Checkpoint(tmp_path)
    packed = weight_bytes(config, spec, Precision(torch.float32, "int8", "int8", "gptq"), files)
    assert packed.experts == counts.experts * (4 + 16 / 32) / 8
    plain = weight_bytes(config, spec, Precision(torch.float32, "plain", "float32", "gptq"), files)
    assert plain.experts == counts.experts * 4


def test_what_fits_follows_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(checkpoint("llama")), dtype="float32")
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec)
    weights = weight_bytes(config, spec, precision)

    def fits(free: int) -> module.Footprint:
        monkeypatch.setattr(module, "available_memory", lambda: weights.total + free)
        return footprint(config, spec, precision, weights)

    width = sum(2 * layer.num_kv_heads * layer.head_dim for layer in spec.attention_layers)
    whole = fits(1 << 30)
    assert whole.kv_token_bytes == 4 * width and whole.max_tokens == spec.max_model_len
    used = whole.max_sequences * whole.max_tokens * whole.kv_token_bytes
    assert 0.3 * (1 << 30) < used <= 0.4 * (1 << 30)
    assert fits(1 << 31).max_sequences >= 2 * whole.max_sequences
    few = fits(50 * 4 * width * 5 // 2 + (1 << 16))
    assert few.max_sequences == 1 and 0 < few.max_tokens < spec.max_model_len
    none = fits(0)
    assert (none.max_tokens, none.max_sequences) == (0, 0)


def refusal(monkeypatch: pytest.MonkeyPatch, config: EngineConfig, free: int) -> str:
    spec = read_spec(config.model_path)
    monkeypatch.setattr(module, "available_memory", lambda: free)
    with pytest.raises(ConfigError) as raised:
        check_weights_fit(config, spec, resolve_precision(config, spec))
    return str(raised.value)


@needs_kernels
def test_a_mixture_that_is_too_big_is_told_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(str(random_checkpoint("tiny-mixture", folder=tmp_path)), dtype="float32")
    # four bytes of 189,824 weights, and two of 65,536 in the table
    text = refusal(monkeypatch, config, 850_000)
    assert text.startswith("the weights take 870 KiB or more as float32")
    for dtype in ("bfloat16", "int8", "int4"):
        assert re.search(rf"{dtype} \(\d+ KiB, with \d+ sequences? of [\d,]+ tokens beside", text)
    assert not caplog.records  # sizing K/V for the advice logs no lowered context
    assert refusal(monkeypatch, config, 1000).endswith("a smaller model is needed")


def test_missing_weights_are_named_before_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_runtime(EngineConfig(str(tmp_path)))
    with pytest.raises(ConfigError, match="the weights take"):
        load_runtime(EngineConfig(str(tmp_path), load_format="random"))


@needs_kernels
def test_a_quantized_checkpoint_is_measured_by_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that fits as it is would not fit in int8, and its plain form names it."""
    write_random(tmp_path, SMALL["gptq"] | WIDE, "test", has_weights=True)
    config, spec = EngineConfig(str(tmp_path), dtype="int8"), read_spec(tmp_path)
    precision = resolve_precision(config, spec)
    weights = weight_bytes(config, spec, precision, Checkpoint(tmp_path))
    need = weights.total + module.expert_scratch_bytes(config, spec, precision, weights)
    assert weights.total < weight_bytes(config, replace(spec, packed=None), precision).total * 0.75
    monkeypatch.setattr(module, "available_memory", lambda: need)
    check_weights_fit(config, spec, precision)
    assert "as gptq" in refusal(monkeypatch, config, need - 1)
    plain = replace(config, dtype="float32")
    assert "dtype auto (" in refusal(monkeypatch, plain, need)


def test_a_gpu_is_measured_by_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was checked there, so that loading ended in an error of the device."""
    config = EngineConfig(str(checkpoint("llama")), dtype="bfloat16", backend="cuda")
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec)
    need = weight_bytes(config, spec, precision).total
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2000)
    for free in (need - 1000, need - 1001):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
        if free + 1000 >= need:
            check_weights_fit(config, spec, precision)
            continue
        with pytest.raises(ConfigError, match=r"dtype int8 \("):
            check_weights_fit(config, spec, precision)


@pytest.mark.parametrize(
    ("family", "variant", "settings", "named"),
    [
        ("llama4_text", "chunks", {}, "attention_chunk_size 16"),
        ("llama", "base", {"dtype": "bfloat16"}, "backend cuda: no heads; use the cpu"),
    ],
)
def test_what_a_gpu_does_not_serve_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, family: str, variant: str, settings: Any, named: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no heads")

    monkeypatch.setattr(model_source, "load_model", fail)
    if family == "llama":
        monkeypatch.setattr(cuda_attention, "CudaKVLayout", refuse)
    config = EngineConfig(str(checkpoint(family, variant)), backend="cuda", **settings)
    with pytest.raises(ConfigError, match=named):
        load_runtime(config)


def test_products_of_tests_are_linear_ops() -> None:
    """packed_bytes finds what is to be found."""
    op: LinearOp = get_backend("cpu").pack_linear(torch.ones(64, 64))
    assert packed_bytes([op], set()) == partial(packed_bytes, seen=set())(op)
