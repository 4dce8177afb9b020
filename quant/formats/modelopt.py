"""NVIDIA ModelOpt: FP8, NVFP4 and MXFP8, from config.json or hf_quant_config.json.

FP8                         weight e4m3 [out, in], weight_scale []
FP8_PER_CHANNEL_PER_TOKEN   weight_scale [out]
FP8_PB_WO                   weight_scale or weight_scale_inv, one of 128 x 128 weights
MXFP8                       weight_scale uint8 [out, in / 32], powers of two
NVFP4                       nvfp4.py
MIXED_PRECISION             each product in one of them
"""

from __future__ import annotations

from quant.formats.base import (
    CheckpointFormat,
    Config,
    ProductFormat,
    expect_object,
    several,
    wrong,
)
from quant.formats.fp8 import NATIVE_SCALE, Fp8
from quant.formats.nvfp4 import MODELOPT_NVFP4

METHOD = "modelopt"
FILE = "hf_quant_config.json"
"""The file of checkpoints whose config.json has no quantization_config."""

_BLOCK = (128, 128)
_ALGORITHMS: dict[str, tuple[ProductFormat, ...]] = {
    "FP8": (Fp8(),),
    "FP8_PER_CHANNEL_PER_TOKEN": (Fp8(),),
    "FP8_PB_WO": (Fp8(block=_BLOCK), Fp8(NATIVE_SCALE, _BLOCK)),
    "MXFP8": (Fp8(block=(1, 32), has_bytes=True),),
    "NVFP4": (MODELOPT_NVFP4,),
}
_MIXED = "MIXED_PRECISION"


def read_modelopt(config: Config) -> CheckpointFormat:
    """Reads quant_method modelopt."""
    name = config.get("quant_algo")
    name = name.upper() if isinstance(name, str) else name
    if name == _MIXED:
        # the tensors of a product show which one it has
        return several(METHOD, [form for forms in _ALGORITHMS.values() for form in forms], "mixed")
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise wrong("quant_algo", name, " or ".join((*_ALGORITHMS, _MIXED)))
    return several(METHOD, _ALGORITHMS[name], "quant_algo")


def read_hf_quant_config(values: Config) -> CheckpointFormat | None:
    """Reads hf_quant_config.json; None if it quantizes K/V at most."""
    quantization = expect_object(values, "quantization")
    return read_modelopt(quantization) if quantization.get("quant_algo") else None
