"""The values of config.json of a GGUF model, and its sampling parameters."""

from __future__ import annotations

import math
from typing import Any

from serve.models.gguf.architectures import find_architecture
from serve.models.gguf.keys import Keys
from serve.models.gguf.names import tensor_sources
from serve.models.gguf.reader import GGUFFile

METHOD = "gguf"
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
Json = dict[str, Any]


def config_values(file: GGUFFile) -> Json:
    """Returns the values of config.json. ModelLoadError names a key or a tensor that is missing,
    unknown or not supported."""
    keys = Keys(file)
    architecture = find_architecture(keys)
    keys.expect("attention.causal", True)
    values = architecture.values(keys)
    keys.check_all_used()
    tensor_sources(keys, architecture, values["model_type"])
    if any(entry.dtype not in _PLAIN for entry in file.entries.values()):
        values["quantization_config"] = {"quant_method": METHOD}
    # a quantized table is unpacked to fp16
    dtype = _PLAIN.get(file.entries["token_embd.weight"].dtype, "float16")
    return values | {"dtype": dtype}


def sampling_values(file: GGUFFile) -> Json:
    """Returns the sampling parameters that the model's makers recommend, as generation_config.json
    has them."""
    values: Json = {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isfinite(value):
            values[name] = value
    return values
