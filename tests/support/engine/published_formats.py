"""The formats in which quantized checkpoints are published: config.json, and the writer of each."""

from __future__ import annotations

from tests.support.engine.format_writers import (
    Json,
    Quantize,
    bnb4,
    bnb8,
    fp8,
    fp8_blocks,
    gptq8,
    hqq,
    int_quantized,
    mxfp4,
    nvfp4,
    pack_quantized,
)


def compressed(form: str, weights: Json, activations: Json | None = None) -> Json:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, "actorder": None} | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {"group_0": group},
    }


def packed_config(bits: int, group: int, **more: object) -> Json:
    strategy = {"strategy": "channel", "group_size": None}
    if group != -1:
        strategy = {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", {"num_bits": bits, "type": "int"} | strategy | more)


def float_config(**weights: object) -> Json:
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    weights = {"num_bits": 8, "type": "float"} | weights
    return compressed("float-quantized", weights, activations)


def native_fp8(block: list[int] | None, **more: object) -> Json:
    config: Json = {"quant_method": "fp8", "activation_scheme": "dynamic"} | more
    return config | {"weight_block_size": block, "modules_to_not_convert": ["lm_head"]}


def bnb_config(kind: str, *, is_nested: bool) -> Json:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
    }


def hqq_config(bits: int, group: int) -> Json:
    weights = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True}
    weights |= {"optimize": True, "round_zero": False, "view_as_float": False}
    settings = {"weight_quant_params": weights, "scale_quant_params": None}
    settings |= {"zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": settings, "skip_modules": ["lm_head"]}


def modelopt(name: str) -> Json:
    return {"quant_method": "modelopt", "quant_algo": name, "ignore": ["lm_head"]}


GPTQ8: Json = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True}

EXACT: dict[str, tuple[Json, Quantize]] = {
    "w4a16": (packed_config(4, 32), pack_quantized(4, 32)),
    "w4a16-asym": (packed_config(4, 32, symmetric=False), pack_quantized(4, 32, sym=False)),
    "w4a16-channel": (packed_config(4, -1), pack_quantized(4, -1)),
    "w4a16-order": (packed_config(4, 32, actorder="group"), pack_quantized(4, 32, order=True)),
    "w8a16-channel": (packed_config(8, -1), pack_quantized(8, -1)),
    "gptq8-channel": (GPTQ8 | {"group_size": -1}, gptq8(-1)),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}),
        nvfp4(),
    ),
    "nvfp4-modelopt": (modelopt("NVFP4"), nvfp4(is_modelopt=True)),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
        mxfp4,
    ),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}
"""Formats whose numbers stay as they are."""

ROUNDED: dict[str, tuple[Json, Quantize]] = {
    "w8a16": (packed_config(8, 32), pack_quantized(8, 32)),
    "w8a16-asym": (packed_config(8, 32, symmetric=False), pack_quantized(8, 32, sym=False)),
    "w8a16-order": (packed_config(8, 32, actorder="group"), pack_quantized(8, 32, order=True)),
    "int8-group": (
        compressed("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
        int_quantized(32),
    ),
    "int8-asym": (
        compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        int_quantized(-1, sym=False),
    ),
    "gptq8": (GPTQ8, gptq8(32)),
    "gptq8-asym": (GPTQ8 | {"sym": False}, gptq8(32, sym=False)),
    "fp8-blocks": (native_fp8([128, 128]), fp8_blocks("weight_scale_inv", 128, 128)),
    "fp8-small-blocks": (native_fp8([32, 16]), fp8_blocks("weight_scale_inv", 32, 16)),
    "fp8-powers": (
        native_fp8([128, 128], scale_fmt="ue8m0"),
        fp8_blocks("weight_scale_inv", 128, 128, "e8m0"),
    ),
    "fp8-tensor": (
        native_fp8(None, activation_scheme="static"),
        fp8("weight_scale_inv", (), per_tensor=True),
    ),
    "fp8-output": (native_fp8(None), fp8("weight_scale", (-1, 1))),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("weight_scale", (-1, 1))),
    "float-tensor": (
        float_config(strategy="tensor"),
        fp8("weight_scale", (1,), per_tensor=True),
    ),
    "float-channel": (float_config(strategy="channel"), fp8("weight_scale")),
    "float-block": (
        float_config(strategy="block", block_structure=[128, 128]),
        fp8_blocks("weight_scale", 128, 128),
    ),
    "mxfp8": (
        compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32}),
        fp8_blocks("weight_scale", 1, 32, "bytes"),
    ),
    "modelopt-fp8": (modelopt("FP8"), fp8("weight_scale", (), per_tensor=True)),
    "modelopt-blocks": (modelopt("fp8_pb_wo"), fp8_blocks("weight_scale", 128, 128, dims=4)),
    "hqq8": (hqq_config(8, 32), hqq(8, 32)),
    "hqq4": (hqq_config(4, 32), hqq(4, 32)),
    "bnb-nf4": (bnb_config("nf4", is_nested=False), bnb4("nf4", 32, is_nested=False)),
    "bnb-nf4-nested": (bnb_config("nf4", is_nested=True), bnb4("nf4", 32, is_nested=True)),
    "bnb-fp4": (bnb_config("fp4", is_nested=True), bnb4("fp4", 32, is_nested=True)),
}
"""Formats that change their numbers when they are loaded, by what their `loss` says."""

PUBLISHED = EXACT | ROUNDED
