"""The table of architectures: model_type -> fields of ModelSpec, and names of tensors.

This folder owns what differs between families: keys of config.json and names of tensors. It
computes nothing and reads no weights. Begin with names.py, then fields.py and llama.py; a family
that resembles one of the table is a function of a few lines and a row.
"""

from __future__ import annotations

from dataclasses import replace

from serve.models.families import (
    convolutions,
    delta_nets,
    dense,
    gated,
    gemma4,
    grouped,
    latent,
    learned,
    llama,
    llama4,
    mamba,
    mixtures,
    nemotron_h,
    sandwich,
)
from serve.models.families.defaults import NESTED_DEFAULTS
from serve.models.families.names import Family

_ROWS: dict[str, Family] = {
    **llama.FAMILIES,
    **dense.FAMILIES,
    **sandwich.FAMILIES,
    **mixtures.FAMILIES,
    **grouped.FAMILIES,
    **llama4.FAMILIES,
    **gemma4.FAMILIES,
    **gated.FAMILIES,
    **latent.FAMILIES,
    **learned.FAMILIES,
    **convolutions.FAMILIES,
    **delta_nets.FAMILIES,
    **mamba.FAMILIES,
    **nemotron_h.FAMILIES,
}
FAMILIES = {
    model_type: replace(family, nested_defaults=NESTED_DEFAULTS.get(model_type, {}))
    for model_type, family in _ROWS.items()
}
