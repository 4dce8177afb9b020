"""Writes small Hugging Face checkpoints as GGUF files, as llama.cpp's conversion does.

The keys are those of its converter, the names those of the package `gguf`, which is published with
it. What the converter does to the tensors of an architecture is a function here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.engine.variants.variant import Json

Named = tuple[str, Tensor]
Change = Callable[[Json, str, Tensor], Iterator[Named]]
Kind = gguf.GGMLQuantizationType
ChooseKind = Callable[[str, Tensor], Kind]


def write_gguf(
    source: Path, target: Path, family: str, choose: ChooseKind = lambda name, tensor: Kind.F32
) -> Path:
    """Writes a checkpoint as a GGUF file. choose: the kind of a tensor that is no vector."""
    config: Json = json.loads((source / "config.json").read_text())
    row = ROWS[family]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[row.arch])
    write_keys(writer, config)
    row.keys(writer, config)
    write_tokenizer_keys(writer, source, config["vocab_size"])
    for name, tensor in gguf_tensors(source, family):
        data = tensor.float().contiguous().numpy()
        kind = Kind.F32 if tensor.ndim == 1 else choose(name, tensor)
        stored = gguf.quants.quantize(data, kind)
        is_plain = kind in (Kind.F32, Kind.F16)
        writer.add_tensor(name, stored, raw_dtype=None if is_plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def gguf_tensors(source: Path, family: str) -> Iterator[Named]:
    """Yields the tensors of a checkpoint with their names in a GGUF file."""
    from safetensors.torch import load_file

    config: Json = json.loads((source / "config.json").read_text())
    row = ROWS[family]
    names = gguf.get_tensor_name_map(row.arch, config["num_hidden_layers"])
    stacks: dict[str, dict[int, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        for changed, value in row.change(config, name, tensor):
            if ".experts." in changed and changed.split(".experts.")[1][0].isdigit():
                start, _, rest = changed.partition(".experts.")
                number, _, ending = rest.partition(".")
                stacks.setdefault(f"{start}.experts.{ending}", {})[int(number)] = value
                continue
            yield _mapped(names, changed), value
    for name, parts in stacks.items():
        yield _mapped(names, name), torch.stack([parts[number] for number in range(len(parts))])
    yield from row.extra(config)


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"{name} has no name in GGUF"
    return found


# -- keys


def write_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes what llama.cpp's TextModel writes for all architectures."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config.get("num_key_value_heads") is not None:
        writer.add_head_count_kv(config["num_key_value_heads"])
    whole = config.get("rope_parameters") or {}
    rope = whole.get("full_attention", whole)
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    local = whole.get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        writer.add_key_value(f"{writer.arch}.rope.freq_base_swa", local, gguf.GGUFValueType.FLOAT32)
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key in ("layer_norm_eps", "norm_epsilon"):
        if config.get(key) is not None:
            writer.add_layer_norm_eps(config[key])
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
    if config.get("num_experts_per_tok") is not None:
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_file_type(0)


def write_tokenizer_keys(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    """Writes the tokenizer of a small checkpoint, a byte BPE."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    model = tokenizer["model"]
    special = {item["content"] for item in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    types = [
        gguf.TokenType.UNUSED
        if number not in by_id
        else gguf.TokenType.CONTROL
        if by_id[number] in special
        else gguf.TokenType.NORMAL
        for number in range(vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)


# -- tensors


def head_dim(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def as_it_is(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor


def permuted(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Interleaves the halves of each head of q and k."""
    for module, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith((f"{module}.weight", f"{module}.bias")):
            halves = tensor.unflatten(0, (config[key], 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def with_norms_plus_one(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def llama_extra(config: Json) -> Iterator[Named]:
    """Yields the divisors of the frequencies that Llama 3's scaling stands for."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    size = head_dim(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    yield "rope_freqs.weight", plain / scaled


def split_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up of fused experts, [experts, 2 * size, hidden], apart."""
    if name.endswith("experts.gate_up_proj"):
        start = name.removesuffix("gate_up_proj")
        gate, up = tensor.chunk(2, 1)
        yield f"{start}gate_proj.weight", gate
        yield f"{start}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


class Row:
    """How an architecture is written."""

    def __init__(
        self,
        arch: gguf.MODEL_ARCH,
        change: Change = as_it_is,
        keys: Callable[[gguf.GGUFWriter, Json], Any] = lambda writer, config: None,
        extra: Callable[[Json], Iterator[Named]] = lambda config: iter(()),
    ) -> None:
        self.arch = arch
        self.change = change
        self.keys = keys
        self.extra = extra


def _llama_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))


_ARCH = gguf.MODEL_ARCH
ROWS = {
    "llama": Row(_ARCH.LLAMA, permuted, _llama_keys, llama_extra),
    "mistral": Row(_ARCH.LLAMA, permuted, _llama_keys, llama_extra),
    "qwen2": Row(_ARCH.QWEN2),
    "qwen3": Row(_ARCH.QWEN3),
}
