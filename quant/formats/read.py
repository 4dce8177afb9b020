"""config.json's quantization_config -> the formats of a checkpoint, by quant_method."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from quant.formats.base import CheckpointFormat, Config, wrong

METHODS = {
    "compressed-tensors": "compressed_tensors:read_compressed_tensors",
    "gptq": "gptq_awq:read_gptq",
    "awq": "gptq_awq:read_awq",
    "auto-round": "gptq_awq:read_auto_round",
    "fp8": "fp8:read_fp8",
    "fbgemm_fp8": "fp8:read_fbgemm_fp8",
    "modelopt": "modelopt:read_modelopt",
    "mxfp4": "mxfp4:read_mxfp4",
    "bitsandbytes": "bitsandbytes:read_bitsandbytes",
    "hqq": "hqq:read_hqq",
    "gguf": "gguf.formats:read_gguf",
}


def read_format(config: Config) -> CheckpointFormat:
    """Reads config.json's quantization_config. ValueError names an unsupported key."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise wrong("quant_method", method, " or ".join(METHODS))
    module, _, function = METHODS[method].partition(":")
    read: Callable[[Config], CheckpointFormat] = getattr(
        import_module(f"quant.formats.{module}"), function
    )
    return read(config)
