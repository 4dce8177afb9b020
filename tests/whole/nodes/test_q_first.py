"""Computing q before k and v gives the same model to the last bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ops import get_backend
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from serve.models import load_model
from serve.models.layers.blocks import AttentionHalf, AttentionWeights, Block
from serve.models.layers.latent import LatentAttention
from serve.models.layers.state import Beside
from tests.support.engine.checkpoints import VARIANTS, Variant, checkpoint
from tests.support.engine.decoders import ListAttention, run, token_ids
from tests.support.engine.quantized import CASES, write
from tests.support.engine.variants.table import is_first

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
]
CHUNKS = [17, 1, 1, 6]
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "make_linear": NATIVE.int8},
    "int4": {
        "dtype": torch.float32,
        "make_linear": partial(NATIVE.rounded4, group=32, is_nf4=False),
    },
}


def check_bits(path: Path, settings: dict[str, Any]) -> None:
    ids = token_ids(sum(CHUNKS))
    fused, split = (
        load_model(path, backend=get_backend("cpu"), q_first=q_first, **settings)
        for q_first in (False, True)
    )
    halves = [attention_halves(model.weights.blocks) for model in (fused, split)]
    layers = zip(fused.spec.attention_layers, *halves, strict=True)
    own = [pair for layer, *pair in layers if layer.shares is None]
    assert own
    assert all(not has_own_query(one) for one, _ in own)
    assert all(has_own_query(two) for _, two in own)
    assert torch.equal(run(split, ids, CHUNKS), run(fused, ids, CHUNKS))


def attention_halves(blocks: list[Block]) -> list[AttentionHalf]:
    """Returns those with K/V, without layers that have a state alone."""
    halves = [block.attention for block in blocks]
    halves = [half.attention if isinstance(half, Beside) else half for half in halves]
    return [half for half in halves if isinstance(half, AttentionWeights | LatentAttention)]


def has_own_query(attention: AttentionHalf) -> bool:
    """Returns whether q and k are two products; the layer has K/V of its own."""
    if isinstance(attention, LatentAttention):
        return attention.inputs is None
    assert isinstance(attention, AttentionWeights)
    return attention.q is not None and attention.qkv is not None


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", [item for item in VARIANTS if is_first(item)], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_every_family_has_the_same_bits(variant: Variant, precision: str) -> None:
    check_bits(checkpoint(variant.family, variant.name), SETTINGS[precision])


def test_int4_has_the_same_bits() -> None:
    check_bits(checkpoint("qwen2"), SETTINGS["int4"])


@pytest.mark.parametrize("case", ["w8a8", "gptq-order", "gptq-asym", "awq"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_quantized_checkpoints_have_the_same_bits(
    case: str, precision: str, tmp_path: Path
) -> None:
    packed, _ = write(tmp_path, *CASES[case], variant="bias")
    check_bits(packed, SETTINGS[precision] | {"unpack": precision == "float32"})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_begins_between_the_two_products(family: str) -> None:
    model = load_model(
        checkpoint(family), dtype=torch.float32, backend=get_backend("cpu"), q_first=True
    )
    attention = ListAttention(model.attention_layers())
    for index, block in enumerate(model.weights.blocks):
        weights = block.attention
        assert isinstance(weights, AttentionWeights)

        def product(x: torch.Tensor, index: int = index, op: Any = weights.qkv) -> torch.Tensor:
            attention.calls.append(("k and v", index))
            out: torch.Tensor = op(x)
            return out

        weights.qkv = product  # type: ignore[assignment]
    model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), attention)
    assert attention.calls == [
        (call, index)
        for index in range(model.spec.num_layers)
        for call in ("begin", "k and v", "finish")
    ]
