"""All small checkpoints that the decoder is compared with Transformers on."""

from __future__ import annotations

from typing import Any

from tests.support.engine.variants import (
    classic,
    dense,
    gated,
    gemma4,
    latent,
    long,
    mamba,
    mixtures,
    sandwich,
    states,
)
from tests.support.engine.variants.classic import LONG_VARIANTS
from tests.support.engine.variants.variant import LLAMA, Json, Variant
from tests.support.profile import every_day

VARIANTS: list[Variant] = [
    *classic.VARIANTS,
    *dense.VARIANTS,
    *sandwich.VARIANTS,
    *mixtures.VARIANTS,
    *gemma4.VARIANTS,
    *gated.VARIANTS,
    *latent.VARIANTS,
    *states.VARIANTS,
    *mamba.VARIANTS,
]


def find_variant(family: str, name: str) -> Variant:
    for item in (*VARIANTS, *LONG_VARIANTS, *long.VARIANTS):
        if (item.family, item.name) == (family, name):
            return item
    raise KeyError(f"{family}-{name} is not in the tables")


def settings_of(variant: Variant) -> Json:
    """Returns the settings for the family's configuration class."""
    return classic.BASES.get(variant.family, LLAMA) | variant.settings


def is_first(variant: Variant) -> bool:
    """Returns whether no other variant of its family stands before it in the table."""
    return next(item for item in VARIANTS if item.family == variant.family) is variant


def first_every_day() -> list[Any]:
    """Returns all variants as parameters. `make test` takes the first one of each family."""
    first = [place for place, variant in enumerate(VARIANTS) if is_first(variant)]
    return every_day(first, VARIANTS)
