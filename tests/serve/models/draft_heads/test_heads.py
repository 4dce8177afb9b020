"""Heads that draft equal references in plain torch, in chunks too; wrong ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backend import Backend
from ops.reference import ReferenceBackend
from serve.models import Decoder, load_model, read_spec
from serve.models.checkpoint import Checkpoint
from serve.models.draft_heads.eagle3 import load_eagle3, read_eagle3
from serve.models.draft_heads.mtp import read_mtp
from serve.models.loaded_tensors import LoadedTensors
from serve.models.weights import joining
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import ListAttention, load, token_ids
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
            states = head.read(hidden)
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
