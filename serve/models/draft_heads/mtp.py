"""Finds the MTP layer of a checkpoint (multi-token prediction: DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from pathlib import Path

from serve.models.families import FAMILIES
from serve.models.families.head_spec import MTP, HeadSpec
from serve.models.spec import ModelSpec, read_language_config


def read_mtp(path: Path, spec: ModelSpec) -> HeadSpec:
    """Returns the first MTP layer of a model's directory; further ones are not used. ModelLoadError
    if it has none that is known."""
    config = read_language_config(path)
    names = FAMILIES[spec.model_type].mtp
    if names is None:
        known = ", ".join(sorted(name for name, family in FAMILIES.items() if family.mtp))
        raise config.fail(
            "model_type",
            f"{spec.model_type!r} has no multi-token prediction head that is known; known:"
            f" {known}; use speculation lookup",
        )
    if not config.integer(names.key, names.default, low=0):
        raise config.fail(
            names.key,
            "is 0: the checkpoint has no multi-token prediction head; use speculation lookup",
        )
    return HeadSpec(
        kind=MTP,
        layer=next(layer for layer in reversed(spec.layers) if layer.attention is not None),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
    )
