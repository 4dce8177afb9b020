"""The table of families in docs/models.md; as a module it writes the page anew."""

from __future__ import annotations

from pathlib import Path

from serve.models.families import FAMILIES
from serve.models.families.layer_spec import LatentSpec, MixtureSpec
from serve.models.families.state_spec import DeltaNetSpec, MambaSpec, ShortConvSpec
from serve.models.spec import ModelSpec, read_spec
from tests.support.engine.checkpoints import VARIANTS, checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- the table of families -->\n", "<!-- end of the table -->\n"
GREEDY = "`tests/whole/test_equality.py`"
WHOLE = "`tests/serve/models/test_multimodal.py`"
# families whose checkpoints are always those of multimodal models -> the case of the test
NESTED = {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"}
NESTED_MIXTURES = {"qwen3_vl_moe_text"}
# what Transformers computes under another name
OTHER_CODE = {"kimi_k2": "Transformers' `deepseek_v3`"}

STATES = {ShortConvSpec: "short convolutions", DeltaNetSpec: "delta nets", MambaSpec: "Mamba-2"}


def kind_of(spec: ModelSpec) -> str:
    """Returns what kind of model this is."""
    mixture = any(isinstance(layer.mlp, MixtureSpec) for layer in spec.layers)
    latent = any(isinstance(layer.attention, LatentSpec) for layer in spec.layers)
    kinds = ["mixture" if mixture else "dense", *(["latent attention"] if latent else [])]
    states = {type(layer.state) for layer in spec.layers if layer.state is not None}
    return ", ".join(kinds + [STATES[kind] for kind in states])


def _kind(model_type: str) -> str:
    if model_type in NESTED | NESTED_MIXTURES:
        return "mixture" if model_type in NESTED_MIXTURES else "dense"
    kinds = [
        kind_of(read_spec(checkpoint(item.family, item.name)))
        for item in VARIANTS
        if item.family == model_type
    ]
    assert kinds, f"{model_type} has no small checkpoint"
    return max(kinds, key=len)


def table() -> str:
    """Returns the rows of all families, in the order of the code."""
    lines = ["| `model_type` | models | kind | tested by | against |", "|---|---|---|---|---|"]
    for model_type, family in FAMILIES.items():
        test = WHOLE if model_type in NESTED | NESTED_MIXTURES else GREEDY
        against = OTHER_CODE.get(model_type, "Transformers")
        row = (f"`{model_type}`", family.title, _kind(model_type), test, against)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, rows: str) -> str:
    """Returns the page with the rows between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
