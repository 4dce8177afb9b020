"""The decoder equals Transformers for every variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops import get_backend
from serve.models import load_model, read_spec
from serve.models.families.fields import CHUNKED, FULL
from tests.support.engine.checkpoints import (
    VARIANTS,
    Json,
    Variant,
    checkpoint,
    edit_json,
    reference_greedy,
    reference_logits,
)
from tests.support.engine.decoders import ListAttention, copy_of, edit_tensors, load, run, token_ids
from tests.support.engine.variants import mamba, states
from tests.support.engine.variants.table import first_every_day, is_first

pytestmark = pytest.mark.usefixtures("one_thread")


# -- equality with Transformers


@pytest.mark.parametrize("variant", first_every_day(), ids=str)
def test_logits_equal_transformers(variant: Variant) -> None:
    path = checkpoint(variant.family, variant.name)
    ids = token_ids(60)
    expected = reference_logits(path, ids)
    assert expected.std() > 0.5
    actual = run(load(path), ids)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=variant.rounding, rtol=1e-5)


CHANGES: list[tuple[str, str, Json]] = [
    ("llama4_text", "chunks", {"attention_chunk_size": None, "layer_types": None}),
    ("llama4_text", "chunks", {"layer_types": [CHUNKED, FULL] * 2 + [FULL]}),
    ("llama4_text", "chunks", {"layer_types": [CHUNKED] * 5}),
    (
        "llama4_text",
        "three-heads",
        {"no_rope_layers": [0, 1, 0, 1], "layer_types": [FULL, CHUNKED, FULL]},
    ),
    ("gemma4_text", "shared", {"rope_parameters": {FULL: {"factor": 4.0}}}),
]


@pytest.mark.parametrize(("family", "variant", "change"), CHANGES)
def test_changed_configurations_equal_transformers(
    family: str, variant: str, change: Json, tmp_path: Path
) -> None:
    """Keys that were ignored: null for no chunks, the types of layers, the factor of a RoPE."""
    path = copy_of(checkpoint(family, variant), tmp_path)

    def edit(config: Json) -> None:
        for key, value in change.items():
            ropes = isinstance(value, dict) and {
                kind: rope | value.get(kind, {}) for kind, rope in config[key].items()
            }
            config[key] = ropes or value

    before = run(load(path), token_ids(60))
    edit_json(path / "config.json", edit)
    expected, actual = reference_logits(path, token_ids(60)), run(load(path), token_ids(60))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
    assert (actual - before).abs().max() > 0.1, "the change has an effect"


@pytest.mark.parametrize("variant", first_every_day(), ids=str)
def test_chunks_equal_the_whole(variant: Variant) -> None:
    """The result depends on positions only, not on how the prompt is divided into calls."""
    decoder = load(checkpoint(variant.family, variant.name))
    ids = token_ids(24, seed=2)
    torch.testing.assert_close(
        run(decoder, ids, [7, 1, 1, 10, 3, 1, 1]),
        run(decoder, ids),
        atol=variant.rounding,
        rtol=1e-5,
    )


@pytest.mark.parametrize("variant", first_every_day(), ids=str)
def test_greedy_tokens_vary(variant: Variant) -> None:
    """Comparing greedy tokens would prove little if they were all equal."""
    tokens = reference_greedy(checkpoint(variant.family, variant.name), token_ids(6), 16)
    assert len(set(tokens)) >= 5, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gpt2"])
def test_cpu_backend_equals_transformers(family: str) -> None:
    path = checkpoint(family)
    ids = token_ids(40)
    decoder = load_model(path, dtype=torch.float32, backend=get_backend("cpu"))
    torch.testing.assert_close(run(decoder, ids), reference_logits(path, ids), atol=1e-3, rtol=1e-4)


STATES = [
    item for item in VARIANTS if is_first(item) and item in (*states.VARIANTS, *mamba.VARIANTS)
]


@pytest.mark.parametrize("variant", STATES, ids=str)
def test_layers_with_states_compute_in_bf16(variant: Variant) -> None:
    """Whatever they compute in fp32, the hidden state stays in the model's type."""
    path, ids = checkpoint(variant.family, variant.name), token_ids(20)
    decoder = load_model(path, dtype=torch.bfloat16, backend=get_backend("cpu"))
    found, expected = run(decoder, ids), reference_logits(path, ids)
    assert (found - expected).std() < 0.4 * expected.std()


def test_windows_have_an_effect(tmp_path: Path) -> None:
    """The same checkpoint without its window gives other logits."""
    path = copy_of(checkpoint("mistral"), tmp_path)
    ids = token_ids(30)
    before = run(load(path), ids)
    edit_json(path / "config.json", lambda config: config.update(sliding_window=None))
    after = run(load(path), ids)
    torch.testing.assert_close(before[:8], after[:8])
    assert (before[8:] - after[8:]).abs().max() > 0.1


def test_positions_beyond_the_first_table(tmp_path: Path) -> None:
    """The cos/sin table grows, and rows of earlier positions stay the same."""
    path = copy_of(checkpoint("llama"), tmp_path)
    edit_json(path / "config.json", lambda config: config.update(max_position_embeddings=1 << 17))
    decoder = load(path)

    def hidden(position: int) -> Tensor:
        attention = ListAttention(decoder.attention_layers())
        attention.k = [torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(3))] * 2
        attention.v = attention.k
        return decoder.forward(torch.tensor([5]), torch.tensor([position]), attention)

    early = hidden(100)
    late = hidden(100_000)
    assert torch.isfinite(late).all()
    assert not torch.allclose(early, late, atol=1e-3)
    assert torch.equal(early, hidden(100))


def test_empty_step() -> None:
    decoder = load(checkpoint("llama"))
    none = torch.empty(0, dtype=torch.int64)
    hidden = decoder.forward(none, none, ListAttention(decoder.attention_layers()))
    assert hidden.shape == (0, 64)


def test_seam_is_called_begin_then_finish_layer_by_layer() -> None:
    decoder = load(checkpoint("gpt2"))
    attention = ListAttention(decoder.attention_layers())
    decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), attention)
    assert attention.calls == [(call, i) for i in range(3) for call in ("begin", "finish")]


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_half_precision_files(family: str, file_dtype: torch.dtype, tmp_path: Path) -> None:
    """A 16-bit checkpoint equals Transformers in fp32, and is close to that in bf16."""
    path = copy_of(checkpoint(family), tmp_path)
    edit_tensors(path, lambda tensors: {name: t.to(file_dtype) for name, t in tensors.items()})
    edit_json(path / "config.json", lambda c: c.update(dtype=str(file_dtype).split(".")[1]))
    assert read_spec(path).torch_dtype == str(file_dtype).removeprefix("torch.")
    ids = token_ids(20)
    exact = run(load(path), ids)
    torch.testing.assert_close(exact, reference_logits(path, ids), atol=1e-4, rtol=1e-5)
    half = run(load(path, torch.bfloat16), ids)
    assert half.dtype == torch.float32
    assert (half - exact).abs().mean() < 0.1 * exact.std()
