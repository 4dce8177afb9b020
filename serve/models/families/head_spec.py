"""The description of a head that drafts: a block beside a model that predicts a further token."""

from __future__ import annotations

from dataclasses import dataclass

from serve.models.families.layer_spec import LayerSpec

MTP, EAGLE3 = "mtp", "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """One block that reads hidden states of a model and the tokens that follow them.

    kind: MTP, part of the model's checkpoint, or EAGLE3, a checkpoint of its own. hidden_size,
    vocab_size: its own. reads: the layers whose inputs it reads, the number of layers for the last
    state (EAGLE-3); () for the last state, normalized (MTP). is_residual_normed: its norm of what
    it reads is before the residual connection (EAGLE-3).
    """

    kind: str
    layer: LayerSpec
    hidden_size: int
    vocab_size: int
    reads: tuple[int, ...] = ()
    is_residual_normed: bool = False
