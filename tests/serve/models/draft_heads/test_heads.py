"""Heads that draft equal references in plain torch, in chunks too; wrong ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backend import Backend
from ops.reference import ReferenceBackend
from serve.errors import ModelLoadError
from serve.models import Decoder, load_model, read_spec
from serve.models.checkpoint import Checkpoint
from serve.models.draft_heads.eagle3 import load_eagle3, read_eagle3
from serve.models.draft_heads.mtp import read_mtp
from serve.models.loaded_tensors import LoadedTensors
from serve.models.weights import joining
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.decoders import ListAttention, edit_tensors, load, token_ids
from tests.support.models.draft_heads import (
    EagleReference,
    MtpReference,
    write_eagle3,
    write_mtp,
)

pytestmark = pytest.mark.usefixtures("one_thread")
MTP = [
    ("deepseek_v3", "yarn"),
    ("deepseek_v3", "no-rank"),
    ("glm4_moe", "groups"),
    ("glm4_moe", "one-group"),
    ("glm4_moe_lite", "groups"),
    ("glm4_moe_lite", "three-heads"),
]


def with_mtp(path: Path) -> Decoder:
    head = read_mtp(path, read_spec(path))
    return load_model(path, dtype=torch.float32, backend=ReferenceBackend(), draft_head=head)


def with_eagle3(path: Path, target: Path) -> Decoder:
    model, backend = load(target), ReferenceBackend()
    head, block = read_eagle3(path, model.spec)
    model.add_draft_head(load_eagle3(path, head, block, model, lambda c: _tensors(c, backend)))
    return model


def _tensors(checkpoint: Checkpoint, backend: Backend) -> LoadedTensors:
    make, kind = joining(backend.pack_linear), torch.float32
    return LoadedTensors(
        checkpoint,
        None,
        backend,
        kind,
        make,
        make,
        weight_dtype=kind,
        unpack=True,
        is_transposed=False,
    )


def check(model: Decoder, reference: Any) -> None:
    """Compares rows with the reference's, in one call and in chunks, and a drafted row."""
    head = model.draft_head
    assert head is not None
    ids = token_ids(40)
    own, logits = reference.forward(ids[1:], reference.states(ids)[:-1].detach())
    assert logits[:, logits[0].isfinite()].std() > 0.3
    for chunks in ([39], [1, 7, 31]):
        attention = ListAttention(model.attention_layers())
        parts: list[Tensor] = []
        start = 0
        for size in chunks:
            rows = torch.arange(start, start + size)
            hidden = model.forward(torch.tensor(ids)[rows], rows, attention)
            states = head.read(head.take(hidden))
            parts.append(head.forward(torch.tensor(ids)[rows + 1], rows, states, attention))
            start += size
        states = torch.cat(parts)
        torch.testing.assert_close(states, own, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(head.logits(states), logits, atol=3e-4, rtol=1e-4)
    token = int(logits[-1].argmax())
    more, _ = reference.forward(
        [*ids[1:], token], torch.cat((reference.states(ids)[:-1], own[-1:]))
    )
    drafted = head.forward(torch.tensor([token]), torch.tensor([39]), states[-1:], attention)
    torch.testing.assert_close(drafted, more[-1:].detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "variant"), MTP)
def test_mtp_equals_the_reference(family: str, variant: str, tmp_path: Path) -> None:
    path = write_mtp(tmp_path, family, variant)
    check(with_mtp(path), MtpReference(path, family, variant))


EAGLES: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    ("llama", "base", {}, (2, 1, 0)),
    (
        "qwen3",
        "base",
        {
            "eagle_aux_hidden_state_layer_ids": [0, 1],
            "hidden_size": 32,
            "norm_before_residual": True,
        },
        (0, 1),
    ),
    ("qwen3", "base", {"eagle_aux_hidden_state_layer_ids": [1], "draft_vocab_size": 320}, (1,)),
]


@pytest.mark.parametrize("as_speculators", [False, True])
@pytest.mark.parametrize(("family", "variant", "changes", "reads"), EAGLES[1:])
def test_eagle3_equals_the_reference(
    family: str,
    variant: str,
    changes: dict[str, Any],
    reads: tuple[int, ...],
    as_speculators: bool,
    tmp_path: Path,
) -> None:
    target = checkpoint(family, variant)
    path = write_eagle3(tmp_path / "head", target, as_speculators=as_speculators, **changes)
    check(with_eagle3(path, target), EagleReference(path, target, reads))


def test_default_layers_are_read(tmp_path: Path) -> None:
    """The layers that are read by default, of a model with latent attention."""
    target = checkpoint("glm4_moe_lite", "groups")
    path = write_eagle3(tmp_path / "head", target)
    number = read_spec(target).num_layers
    check(with_eagle3(path, target), EagleReference(path, target, (2, number // 2, number - 3)))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures does not name an EAGLE-3 head"),
    ({"model_type": "qwen3"}, "model_type is not supported; known: llama"),
    ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
    ({"norm_output": True}, "norm_output is not supported"),
    ({"fc_norm": True}, "fc_norm is not supported"),
    ({"target_hidden_size": 32}, "target_hidden_size is 32, but the model's hidden_size is 48"),
    ({"vocab_size": 300}, "vocab_size is 300, but the model's is 320"),
    ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ({"draft_vocab_size": 119}, "tensor lm_head.weight has shape"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 9]}, "must list layers of the model, which has 2"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2]}}, "must list layers"),
    ({"eagle_aux_hidden_state_layer_ids": "all"}, "must list layers"),
    ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_wrong_eagle3_configurations(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = checkpoint("qwen3", "base")
    reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    path = write_eagle3(tmp_path / "head", target, **reads)
    edit_json(path / "config.json", lambda values: values.update(change))
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        with_eagle3(path, target)


def _without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def _replaced(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensor}


TENSORS = [
    (_without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    (_without("fc.weight"), "tensor fc.weight is missing"),
    (_without("d2t"), "tensor d2t is missing"),
    (_replaced("d2t", torch.full((120,), 400)), "d2t must give each token another one below 320"),
    (_replaced("d2t", -torch.arange(120)), "d2t must give each token another one below 320"),
    (_replaced("d2t", torch.ones(120)), "d2t must be 120 whole numbers"),
    (_replaced("fc.weight", torch.ones(48, 64)), "tensor fc.weight has shape [48, 64]"),
    (_replaced("norm.weight", torch.full((48,), torch.nan)), "norm.weight holds NaN"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=[m for _, m in TENSORS])
def test_wrong_eagle3_tensors(change: Any, message: str, tmp_path: Path) -> None:
    target = checkpoint("qwen3", "base")
    reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    path = write_eagle3(tmp_path / "head", target, **reads)
    edit_tensors(path, change)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        with_eagle3(path, target)


def test_sglang_counts_outputs(tmp_path: Path) -> None:
    """The layers in eagle_config are those whose outputs are read: the next layers' inputs."""
    target = checkpoint("qwen3", "base")
    path = write_eagle3(tmp_path / "head", target)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}
    edit_json(path / "config.json", lambda values: values.update(ids))
    assert read_eagle3(path, read_spec(target))[0].reads == (0, 1, 2)


def test_mtp_layer_is_wrong(tmp_path: Path) -> None:
    path = write_mtp(tmp_path, "glm4_moe", "groups")
    edit_tensors(path, _without(f"model.layers.{read_spec(path).num_layers}.eh_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"eh_proj\.weight is missing"):
        with_mtp(path)


def test_unused_copies_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_mtp(tmp_path, "glm4_moe", "groups")
    with caplog.at_level("INFO"):
        load(path)
        assert "multi-token prediction head is not loaded" in caplog.text
        caplog.clear()
        with_mtp(path)
        assert "not loaded" not in caplog.text
        assert "not used" not in caplog.text
