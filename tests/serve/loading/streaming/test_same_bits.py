"""A model whose weights stream from the disk computes the bits of one that is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.errors import ConfigError
from tests.support.engine.decoders import run, token_ids
from tests.support.models.packed_models import IDS, copy_of_model, logits, start
from tests.support.models.streamed import least_budget, make_small, stream_of, streaming

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]
CASES = [
    ("llama", "base", "int8"),
    ("llama", "base", "int4"),
    ("llama", "base", "bfloat16"),
    ("llama", "gptq", "int8"),
    ("qwen2", "base", "int8"),
    ("qwen3_moe", "head-24", "int8"),
    ("qwen3_moe", "head-24", "bfloat16"),
    ("deepseek_v3", "yarn", "int8"),
    ("gpt_oss", "yarn", "int8"),
    ("qwen3_next", "odd", "int8"),
    ("kimi_linear", "odd", "bfloat16"),
    ("falcon_h1", "gate", "bfloat16"),
    ("nemotron_h", "latent", "int8"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.mark.parametrize(("family", "variant", "weights"), CASES)
def test_with_the_least_memory(family: str, variant: str, weights: str, tmp_path: Path) -> None:
    path = copy_of_model(family, variant, tmp_path)
    want = logits(path, weights=weights)
    budget = least_budget(path, weights)
    model = start(path, streaming(budget), weights=weights)
    for _ in range(3):
        assert torch.equal(run(model, IDS), want)
    stream = stream_of(model)
    stats = stream.stats()
    assert stats.resident_bytes <= budget and stats.read_bytes > 0 and stats.failed == 0
    assert (stats.expert_misses > 0) == bool(stream.slots)
    stream.close()
    assert stream.stats().resident_bytes == 0


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 2.0])
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[8]])
def test_with_more_memory_less_is_read(
    case: tuple[str, str, str], share: float, tmp_path: Path
) -> None:
    family, variant, weights = case
    path = copy_of_model(family, variant, tmp_path)
    want = logits(path, weights=weights)
    whole = start(path, streaming(1 << 30), weights=weights)
    total = stream_of(whole).num_bytes
    assert torch.equal(run(whole, IDS), want) and stream_of(whole).stats().read_bytes == 0
    budget = max(int(total * share), least_budget(path, weights))
    model = start(path, streaming(budget), weights=weights)
    ids = token_ids(1, 3)
    assert torch.equal(run(model, IDS), want)
    assert torch.equal(run(model, ids), run(whole, ids))
    stats = stream_of(model).stats()
    assert stats.resident_bytes <= budget and (stats.read_bytes == 0) == (share > 1)
    for one in (whole, model):
        stream_of(one).close()


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    with pytest.raises(ConfigError, match=r"weight_memory_bytes 1 byte.* this model needs \d+"):
        start(path, streaming(1))


def test_a_file_of_a_usual_start_is_used_and_the_other_way_round(tmp_path: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    want = logits(path)  # writes the file
    (file,) = (path / ".mergestep").glob("*.packed")
    content = file.read_bytes()
    model = start(path, streaming(least_budget(path)))
    assert torch.equal(run(model, IDS), want) and file.read_bytes() == content
    stream_of(model).close()
    file.unlink()
    stream_of(start(path, streaming(1 << 30))).close()
    assert file.read_bytes() == content, "packing in pieces writes the same file"
