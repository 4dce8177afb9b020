"""A fuzz target for config.json: a mutated configuration is read or refused, for every family.

Seeds are configurations of Transformers' own classes, which are small JSON files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import tracemalloc
from pathlib import Path

from serve.errors import ModelLoadError
from serve.models.families import FAMILIES
from serve.models.spec import ModelSpec, read_spec
from tests.support.engine.variants.table import VARIANTS, settings_of
from tests.support.engine.variants.variant import Json

MAX_BYTES = 64 << 20
"""What reading a configuration may allocate; 4096 layers with a rope each take a part of it."""


# keys of which each family reads some
_OPTIONAL: Json = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "sliding_window_pattern": "LG",
    "use_sliding_window": True,
    "max_window_layers": 1,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", "sparse"],
    "moe_topk": [2, 2],
    "per_layer_config": {"1": {"head_dim": 32}},
    "partial_rotary_factor": 1.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 3.0,
    "eos_token_id": [1, 2],
    "auto_map": None,
    "quantization_config": None,
}


def _seeds() -> tuple[bytes, ...]:
    values = [settings_of(item) | {"model_type": item.family} for item in VARIANTS]
    values += [item | _OPTIONAL for item in values if item["model_type"] in FAMILIES]
    nested = [{"model_type": "whole", "text_config": item} for item in values[::5]]
    return tuple(json.dumps(item).encode() for item in [*values, *nested])


SEEDS = _seeds()


@functools.cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-config-"))


def run(data: bytes) -> None:
    (_directory() / "config.json").write_bytes(data)
    spec: ModelSpec | None = None
    tracemalloc.start()
    try:
        with contextlib.suppress(ModelLoadError):
            spec = read_spec(_directory())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES, peak
    if spec is not None:
        assert spec.num_layers >= len(spec.attention_layers) >= 1
