"""Models that are loaded through kept packed weights, for tests."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops import get_backend
from ops.cpu.native_quantized_linear import NATIVE
from serve.models import Decoder, load_model
from serve.models.checkpoint import Checkpoint
from serve.models.loaded_tensors import TensorCache
from serve.models.packed_cache import folder as folders
from serve.models.packed_cache.cache import PackedCache
from tests.support.engine import quantized
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import run, token_ids

IDS = token_ids(7)


def copy_of_model(family: str, variant: str, folder: Path) -> Path:
    """variant: of the tables, or a case of tests/support/engine/quantized.py."""
    if variant in quantized.CASES:
        return quantized.write(folder, *quantized.CASES[variant])[0]
    return Path(shutil.copytree(checkpoint(family, variant), folder / "model"))


def cache_for(**settings: object) -> PackedCache:
    return PackedCache("test", min_bytes=0, **settings)  # type: ignore[arg-type]


def start(path: Path, cache: TensorCache, *, weights: str = "int8") -> Decoder:
    """Loads a model as an engine does, and waits for the file."""
    is_int8 = weights != "bfloat16"
    make = {
        "int8": NATIVE.int8,
        "int4": partial(NATIVE.rounded4, group=32, is_nf4=False),
        "bfloat16": None,
    }[weights]
    decoder = load_model(
        path,
        dtype=torch.float32 if is_int8 else torch.bfloat16,
        backend=get_backend("cpu"),
        make_linear=make,
        make_head=NATIVE.int8 if is_int8 else None,
        keep_weight_dtype=is_int8,
        unpack=not is_int8,
        packed_cache=cache,
    )
    if isinstance(cache, PackedCache) and cache.writer is not None:
        cache.writer.join()
    return decoder


def logits(path: Path, cache: TensorCache | None = None, *, weights: str = "int8") -> Tensor:
    return run(start(path, cache or cache_for(), weights=weights), IDS)


def kept(path: Path) -> list[Path]:
    return sorted((path / folders.BESIDE).glob(f"*{folders.ENDING}"))


def forbid_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a weight was read from the checkpoint")

    monkeypatch.setattr(Checkpoint, "fetch", fail)
