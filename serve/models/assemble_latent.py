"""Builds latent attention from a source of tensors."""

from __future__ import annotations

from ops.backend import Backend, Fusion
from serve.models.blocks import AttentionHalf
from serve.models.families.layer_spec import LatentSpec
from serve.models.families.names import WeightNames
from serve.models.spec import ModelSpec
from serve.models.tensors import TensorSource


def assemble_latent(
    model: ModelSpec,
    spec: LatentSpec,
    names: WeightNames,
    at: str,
    fusion: Fusion,
    rotation: int | None,
    source: TensorSource,
    backend: Backend,
) -> AttentionHalf:
    """Builds the attention of the block whose tensors' names begin with `at`."""
    raise NotImplementedError
