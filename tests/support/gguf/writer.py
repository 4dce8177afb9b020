"""Writes small Hugging Face checkpoints as GGUF files, as llama.cpp's conversion does.

The keys are those of its converter, the names those of the package `gguf`, which is published with
it. What the converter does to an architecture is a row of `rows.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor

from tests.support.engine.variants.variant import Json
from tests.support.gguf.quantized import Packed, read_tensors
from tests.support.gguf.rows import ROWS

_STACKED = re.compile(r"(?P<start>.*)\.(?P<what>experts|norms)\.(?P<number>\d+)(?P<ending>\..*)")
_EXPERTS = ("num_local_experts", "num_experts")
_FUSIONS = (
    (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
    (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
)
Written = tuple[str, Tensor, str | None]
"""A tensor with its name in a GGUF file, and its kind if it is packed."""


def write_gguf(
    source: Path,
    target: Path,
    family: str,
    weights: Packed | None = None,
    *,
    pre: str = "gpt-2",
    is_fused: bool = False,
    split_tensors: int = 0,
) -> Path:
    """Writes a checkpoint as a GGUF file, in fp32 but for the packed weights. pre: the name of the
    way in which texts are split. is_fused: as with the converter's --fuse-qkv and
    --fuse-gate-up-exps. split_tensors: the most tensors of a file of a split model; the first one
    is returned."""
    config: Json = json.loads((source / "config.json").read_text())
    row = ROWS[family]
    arch = gguf.MODEL_ARCH_NAMES[row.arch]
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=split_tensors)
    if row.has_common_keys:
        write_keys(writer, config)
    row.keys(writer, config | {"source": str(source)})
    write_tokenizer_keys(writer, source, config["vocab_size"], pre)
    tensors = gguf_tensors(source, family, weights or {})
    for name, tensor, kind in fused(tensors) if is_fused else tensors:
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, tensor.contiguous().numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target if not split_tensors else min(target.parent.glob(f"{target.stem}-*.gguf"))


def gguf_tensors(source: Path, family: str, weights: Packed) -> Iterator[Written]:
    """Yields the tensors of a checkpoint with their names in a GGUF file, and the kinds of those
    that are packed."""
    config: Json = json.loads((source / "config.json").read_text())
    row = ROWS[family]
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(row.arch, num_layers)
    stacks: dict[str, dict[int, Tensor]] = {}
    kinds: dict[str, str | None] = {}
    for name, plain in read_tensors(source).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        tensor, kind = weights.get(name, (plain.float(), None))
        for changed, value in row.change(config, name, tensor):
            part = _STACKED.fullmatch(changed)
            if part is None:
                yield _mapped(names, changed), value, kind
                continue
            is_norm = part["what"] == "norms"
            stack = part["start"] + ("" if is_norm else ".experts") + part["ending"]
            stacks.setdefault(stack, {})[int(part["number"])] = value
            kinds[stack] = kind
    for name, parts in stacks.items():
        stacked = torch.stack([parts[number] for number in range(len(parts))])
        yield _mapped(names, name), stacked, kinds[name]
    for name, tensor in row.extra(config):
        yield name, tensor, None


def fused(tensors: Iterable[Written]) -> Iterator[Written]:
    """Yields q, k and v of a layer as one tensor, and gate and up of its experts as one."""
    waiting: dict[str, dict[str, Written]] = {}
    for written in tensors:
        name = written[0]
        for stems, joined, axis in _FUSIONS:
            stem = next((stem for stem in stems if f".{stem}." in name), None)
            if stem is None:
                continue
            target = name.replace(stem, joined)
            parts = waiting.setdefault(target, {})
            parts[stem] = written
            if len(parts) == len(stems):
                whole = torch.cat([parts[stem][1] for stem in stems], axis)
                yield target, whole, written[2]
                del waiting[target]
            break
        else:
            yield written
    for parts in waiting.values():  # of layers that lack one of them
        yield from parts.values()


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
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
    experts = next((config[key] for key in _EXPERTS if config.get(key) is not None), None)
    if experts is not None:
        writer.add_expert_count(experts)
    used = config.get("num_experts_per_tok") or config.get("top_k_experts")
    if used is not None:
        writer.add_expert_used_count(used)
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_file_type(0)


def write_tokenizer_keys(writer: gguf.GGUFWriter, source: Path, vocab_size: int, pre: str) -> None:
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
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)
