"""The table of architectures: model_type -> fields of ModelSpec, and names of tensors.

This folder owns what differs between families: keys of config.json and names of tensors. It
computes nothing and reads no weights. Begin with names.py, then fields.py and llama.py; a family
that resembles one of the table is a function of a few lines and a row.
"""

from __future__ import annotations

from serve.models.families import (
    dense,
    gated,
    gemma4,
    latent,
    learned,
    llama,
    llama4,
    mixtures,
    sandwich,
)
from serve.models.families.names import Family

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **dense.FAMILIES,
    **sandwich.FAMILIES,
    **mixtures.FAMILIES,
    **llama4.FAMILIES,
    **gemma4.FAMILIES,
    **gated.FAMILIES,
    **latent.FAMILIES,
    **learned.FAMILIES,
}
