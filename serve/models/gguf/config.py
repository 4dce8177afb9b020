"""The values of config.json and generation_config.json of a GGUF model."""

from __future__ import annotations

from typing import Any

from serve.models.gguf.architectures import find_architecture
from serve.models.gguf.keys import Keys
from serve.models.gguf.names import tensor_sources
from serve.models.gguf.reader import GGUFFile

METHOD = "gguf"
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ENDS = ("eos", "eot", "eom")
# ends of a turn that files do not name by a key
_END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
)
_CONTROL = 3  # the type of a token that is no text
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
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    if isinstance(bos, int):
        values["bos_token_id"] = bos
    # a quantized table is unpacked to fp16
    dtype = _PLAIN.get(file.entries["token_embd.weight"].dtype, "float16")
    return values | {"dtype": dtype, "eos_token_id": end_tokens(file)}


def generation_values(file: GGUFFile) -> Json:
    """Returns the values of generation_config.json: the ids that end an answer, and the sampling
    parameters that the model's makers recommend."""
    values: Json = {"eos_token_id": end_tokens(file)}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)):
            values[name] = value
    return values


def end_tokens(file: GGUFFile) -> list[int]:
    """Returns the ids that end an answer, those that the keys name first."""
    metadata = file.metadata
    named = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS]
    found = [token for token in named if type(token) is int and token >= 0]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list) or len(types) < len(tokens):
        return list(dict.fromkeys(found))
    ends = {
        token: number
        for number, token in enumerate(tokens)
        if token in _END_TOKENS and types[number] == _CONTROL
    }
    if "<|return|>" in ends:  # of gpt-oss, where <|end|> is the end of a part of an answer
        ends.pop("<|end|>", None)
    return list(dict.fromkeys([*found, *ends.values()]))
