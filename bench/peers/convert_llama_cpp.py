"""Converts a checkpoint for llama.cpp: Llama, Qwen3-MoE, OLMoE, LFM2 and Qwen3.5, in bf16, or the
first three in GPTQ with 4 bits.

    python bench/peers/convert_llama_cpp.py CHECKPOINT OUT.gguf

It needs a virtual environment with `pip install gguf numpy`. Products in bf16 become Q8_0, and
symmetric 4-bit ones of GPTQ become Q4_0 with the same values. The file has a made-up vocabulary,
because the runner passes token ids.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

ARCHITECTURES = {
    "llama": "llama",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    # LFM2
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    # Qwen3.5
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
OF_QWEN35 = {"post_attention_layernorm": "post_attention_norm"}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",  # LFM2's last norm, under this name
    "lm_head": "output",
}
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
_Q4_0_INPUTS = 32  # of a block: an fp16 scale and 16 bytes
_CHUNK = 4096  # rows that are quantized at once
_FLOATS = {"F32": np.float32, "F16": np.float16}
Matrix = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Change = Callable[[Matrix], Matrix]


class Converted(NamedTuple):
    """A tensor of the new file. shape: in values. make: computes its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    make: Callable[[], NDArray[Any]]


class Source:
    """The tensors of a checkpoint's safetensors files, mapped into memory."""

    def __init__(self, checkpoint: Path) -> None:
        self._entries: dict[str, tuple[Bytes, str, list[int]]] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            data = np.memmap(path, np.uint8, "r", offset=8 + size)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                self._entries[name] = (data[start:end], entry["dtype"], entry["shape"])

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def modules(self) -> list[str]:
        """Returns the names of all tensors without their last part, in the file's order."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self._entries))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2])

    def floats(self, name: str) -> Matrix:
        data, dtype, shape = self._entries[name]
        if dtype in _FLOATS:
            return data.view(_FLOATS[dtype]).astype(np.float32).reshape(shape)
        assert dtype == "BF16", f"{name} is {dtype}"  # numpy has no type for it
        upper = data.view(np.uint16).astype(np.uint32) << 16
        return upper.view(np.float32).reshape(shape)

    def raw(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        data, _, shape = self._entries[name]
        return data.view(dtype).reshape(shape)


def convert(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    assert architecture is not None, f"only {', '.join(ARCHITECTURES)} are supported"
    writer = gguf.GGUFWriter(out, architecture)
    source = Source(checkpoint)
    _write_sizes(writer, config, source)
    tensors = list(_tensors(source, config))
    for each in tensors:
        is_plain = each.kind == gguf.GGMLQuantizationType.F32
        block, size = gguf.GGML_QUANT_SIZES[each.kind]
        width = each.shape[-1] // block * size
        shape = each.shape if is_plain else (*each.shape[:-1], width)
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(each.name, shape, dtype, num_bytes, raw_dtype=each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in tensors:  # one at a time in memory
        writer.write_tensor_data(each.make())
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], source: Source) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "lfm2":
        _write_lfm2(writer, config, source)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rotated = head_dim
    if config["model_type"] == "qwen3_5_text":
        _write_qwen35(writer, config)
        rotated = int(head_dim * rope["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    is_packed = "quantization_config" in config
    types = gguf.LlamaFileType
    writer.add_file_type(types.MOSTLY_Q4_0 if is_packed else types.MOSTLY_Q8_0)
    _write_vocabulary(writer, config["vocab_size"])


def _write_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], source: Source) -> None:
    """Writes no K/V heads for layers with a short convolution, which marks them."""
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    num_heads = config["num_key_value_heads"]
    is_conv = [f"{layer}.conv.conv.weight" in source for layer in layers]
    writer.add_head_count_kv([0 if conv else num_heads for conv in is_conv])
    # the configuration has a size from which the model's follows
    writer.add_feed_forward_length(source.shape(f"{layers[0]}.feed_forward.w1.weight")[0])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _write_qwen35(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    num_heads, head_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    assert head_dim == config["linear_key_head_dim"], "llama.cpp has one size of both"
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * head_dim)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of images; texts have one position


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Writes a made-up text for each token. The server needs them, though the runner passes ids;
    none is part of a character, since the server holds such tokens back."""
    texts = [f"t{number} " for number in range(size)]
    texts[10] = "\n"  # the server looks for one
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _tensors(source: Source, config: dict[str, Any]) -> Iterator[Converted]:
    names = NAMES | (OF_QWEN35 if config["model_type"] == "qwen3_5_text" else {})
    for module in source.modules():
        if module == "lm_head" and config["tie_word_embeddings"]:
            continue
        if module in OUTSIDE:
            change = _change(config, module)
            yield _converted(source, OUTSIDE[module], [module], change)
            continue
        _, _, layer, part = module.split(".", 3)
        if part == "linear_attn":
            yield from _decay(source, layer, config)
            continue
        modules = [module]
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", part):
            if expert[1] != "0":  # they stand in one tensor, at the place of the first one
                continue
            part = f"mlp.experts.{expert[2]}"
            experts = f"{module.split('.experts.')[0]}.experts"
            modules = [f"{experts}.{i}.{expert[2]}" for i in range(config["num_experts"])]
        yield _converted(source, f"blk.{layer}.{names[part]}", modules, _change(config, part))


def _change(config: dict[str, Any], part: str) -> Change | None:
    """Returns what makes llama.cpp's values out of a part's, if they differ."""
    kind = config["model_type"]
    if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        # llama.cpp rotates neighbours in Llama, and halves in the others
        key = {"self_attn.q_proj": "num_attention_heads"}.get(part, "num_key_value_heads")
        return partial(_paired, heads=config[key])
    if part == "conv.conv":
        return _flat
    if kind != "qwen3_5_text":
        return None
    if part.startswith("linear_attn.") and part != "linear_attn.norm":
        return partial(_value_heads, part.removeprefix("linear_attn."), config)
    if part.endswith(("norm", "layernorm")) and part != "linear_attn.norm":
        return _plus_one
    return None


def _decay(source: Source, layer: str, config: dict[str, Any]) -> Iterator[Converted]:
    """Yields what decides how fast a gated delta net forgets."""
    path, name = f"model.layers.{layer}.linear_attn", f"blk.{layer}.ssm"
    shape, kind = source.shape(f"{path}.A_log"), gguf.GGMLQuantizationType.F32

    def rate() -> Matrix:
        return _value_heads("A_log", config, -np.exp(source.floats(f"{path}.A_log")))

    def bias() -> Matrix:
        return _value_heads("dt_bias", config, source.floats(f"{path}.dt_bias"))

    yield Converted(f"{name}_a", shape, kind, rate)
    yield Converted(f"{name}_dt.bias", shape, kind, bias)


def _converted(source: Source, name: str, modules: list[str], change: Change | None) -> Converted:
    """Returns the tensor of some modules of the checkpoint, one for each expert."""
    name, first = f"{name}.weight", modules[0]
    outer = () if len(modules) == 1 else (len(modules),)
    if f"{first}.qweight" in source:
        assert change is None, f"{name} is not in Q8_0"
        rows, num_out = source.shape(f"{first}.qweight")
        shape = (*outer, num_out, 8 * rows)

        def packed() -> NDArray[Any]:
            return np.stack([_q4_0(source, module) for module in modules])

        return Converted(name, shape, Q4_0, packed)
    shape = (*outer, *source.shape(f"{first}.weight"))

    def values(module: str) -> Matrix:
        found = source.floats(f"{module}.weight")
        return found if change is None else change(found)

    is_conv = first.endswith(("conv.conv", "conv1d"))
    if is_conv:
        shape = (shape[0], shape[-1])
    if is_conv or len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return Converted(name, shape, gguf.GGMLQuantizationType.F32, lambda: values(first))

    def rounded() -> NDArray[Any]:
        return np.stack([_q8_0(values(module)) for module in modules])

    return Converted(name, shape, Q8_0, rounded)


def _q4_0(source: Source, module: str) -> Bytes:
    """Returns symmetric 4-bit codes of GPTQ in blocks of Q4_0: scale * (code - 8), in both."""
    packed = source.raw(f"{module}.qweight", np.int32)  # eight inputs each, the first one lowest
    scales = source.raw(f"{module}.scales", np.float16)
    zeros = source.raw(f"{module}.qzeros", np.uint32)
    assert (zeros == 0x77777777).all(), f"{module} is not symmetric"
    pairs = np.ascontiguousarray(packed.T).view(np.uint8)
    codes = np.empty((len(pairs), 2 * pairs.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = pairs & 15, pairs >> 4
    num_out, num_in = codes.shape
    halves = codes.reshape(num_out, num_in // _Q4_0_INPUTS, 2, _Q4_0_INPUTS // 2)
    blocks = np.empty((num_out, num_in // _Q4_0_INPUTS, 2 + _Q4_0_INPUTS // 2), np.uint8)
    each = np.repeat(scales.T, num_in // _Q4_0_INPUTS // len(scales), axis=1)
    blocks[..., :2] = np.ascontiguousarray(each)[..., None].view(np.uint8)
    blocks[..., 2:] = halves[..., 0, :] | halves[..., 1, :] << 4
    return blocks.reshape(num_out, -1)


def _q8_0(values: Matrix) -> Bytes:
    chunks = (
        np.ascontiguousarray(values[at : at + _CHUNK]) for at in range(0, len(values), _CHUNK)
    )
    return np.concatenate([gguf.quants.quantize(chunk, Q8_0) for chunk in chunks])


def _paired(values: Matrix, heads: int) -> Matrix:
    """Returns the rows of q or k with rotated dimensions side by side, not half a head apart."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _flat(values: Matrix) -> Matrix:
    """Returns the kernel of a convolution without the dimension of a channel's inputs."""
    return np.ascontiguousarray(values[:, 0])


def _plus_one(values: Matrix) -> Matrix:
    """Returns the factors of a norm, which Qwen3.5 stores about 0."""
    return values + 1


def _value_heads(part: str, config: dict[str, Any], values: Matrix) -> Matrix:
    """Returns values of a part of a gated delta net in llama.cpp's order of its value heads.

    A checkpoint has those of one key head beside one another; llama.cpp has the first one of every
    key head, then the second ones."""
    if part == "conv1d":
        values = _flat(values)
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    num_each, dim = config["linear_num_value_heads"] // num_keys, config["linear_value_head_dim"]
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        dim = 1
    if part == "out_proj":
        heads = values.reshape(len(values), num_keys, num_each, dim)
        return heads.swapaxes(1, 2).reshape(values.shape)
    before = 2 * num_keys * key_dim if part in ("in_proj_qkv", "conv1d") else 0
    heads = values[before:].reshape(num_keys, num_each, dim, *values.shape[1:])
    moved = heads.swapaxes(0, 1).reshape(values[before:].shape)
    return np.concatenate([values[:before], moved])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.checkpoint, args.out)
