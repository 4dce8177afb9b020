"""Loading a mixture takes its weights once: peak memory, and time that many tensors do not cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.common.checkpoint_shapes import config_of, gptq
from bench.common.checkpoints import write_random
from ops.cpu import native_library
from serve.models.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="packed sizes are those of the kernels"
)
# Loads in a process of its own and prints the bytes of its weights and the growth of its peak of
# memory that no file backs, read every millisecond.
LOAD = """
import sys, threading, time
from serve.config import EngineConfig
from serve.loading.footprint import weight_bytes
from serve.loading.precision import resolve_precision
from serve.loading.runtime import load_runtime
from serve.machine import memory_parts
from serve.models import read_spec
from serve.models.checkpoint import Checkpoint
config = EngineConfig(sys.argv[1], dtype=sys.argv[2], max_model_len=256,
    kv_cache_bytes=1 << 24, compute_threads=1, packed_cache="off")
spec = read_spec(config.model_path)
precision = resolve_precision(config, spec)
expected = weight_bytes(config, spec, precision, Checkpoint(config.model_path)).total
before, peak, is_over = memory_parts()["anonymous"], 0, False
def watch():
    global peak
    while not is_over:
        peak = max(peak, memory_parts()["anonymous"])
        time.sleep(0.001)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
runtime = load_runtime(config)
is_over = True
watcher.join()
print(expected, max(peak, memory_parts()["anonymous"]) - before)
"""
MIB = 1 << 20


def mixture(folder: Path, *, is_packed: bool) -> Path:
    """Writes a mixture of about 200 MB in bf16, or of 150 MB in 4 bits."""
    config = config_of("qwen3-30b-a3b") | {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 3 if is_packed else 2,
        "num_experts": 64 if is_packed else 32,
        "num_attention_heads": 8,
        "vocab_size": 4096,
        "quantization_config": gptq(128) if is_packed else None,
    }
    write_random(folder, config, "mixture", has_weights=True)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(("is_packed", "dtype"), [(True, "auto"), (False, "int8"), (False, "int4")])
def test_loading_keeps_no_second_copy(is_packed: bool, dtype: str, tmp_path: Path) -> None:
    """The peak is what the weights take, and one product with its unpacked parts."""
    path = mixture(tmp_path, is_packed=is_packed)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), dtype], capture_output=True, text=True, check=True
    )
    expected, grown = map(int, done.stdout.split())
    assert expected > 50 * MIB
    assert grown < 1.05 * expected + 96 * MIB, f"{grown / MIB:.0f} of {expected / MIB:.0f} MiB"


def test_a_header_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are opened again after each layer without reading their headers again."""
    path = mixture(tmp_path, is_packed=True)
    checkpoint = Checkpoint(path)
    opened: list[Path] = []
    monkeypatch.setattr("serve.models.mapped_file.safe_open", lambda file, **_: opened.append(file))
    name = next(iter(checkpoint.entries))
    first = checkpoint.fetch(name).clone()
    checkpoint.release()
    assert checkpoint.fetch(name).equal(first) and not opened


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_what_was_read_leaves_the_page_cache_where_memory_is_short(
    available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly the bytes that were fetched, and those of a tensor's part alone."""
    save_file({"a": torch.ones(3, 5000), "b": torch.ones(5000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("serve.models.checkpoint.available_memory", lambda: available)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, advice: dropped.append((at, size)))
    checkpoint = Checkpoint(tmp_path)
    start = checkpoint.entries["a"].start
    assert checkpoint.fetch("a", 1).sum() == 5000
    checkpoint.release()
    checkpoint.release()
    assert dropped == ([] if available else [(start + 20_000, 20_000)])
    checkpoint.fetch("b"), checkpoint.fetch("a", 0), checkpoint.fetch("a", 2)
    checkpoint.release()
    if not available:
        assert dropped[1:] == [(start, 20_000), (start + 40_000, 40_000)]
    checkpoint.fetch("b")
    (tmp_path / "model.safetensors").unlink()
    checkpoint.release()
    assert len(dropped) == (0 if available else 3), "of a file that is gone nothing is dropped"


def test_an_empty_tensor_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kernel, no bytes from a place on are all bytes from there on."""
    save_file({"a": torch.ones(0), "b": torch.ones(5000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("serve.models.checkpoint.available_memory", lambda: 0)
    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, advice: dropped.append(size))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.fetch("a")
    checkpoint.release()
    assert not dropped
