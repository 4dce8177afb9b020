"""Converts a Llama checkpoint in bf16 to Q8_0 for llama.cpp.

    python bench/peers/convert_llama_cpp.py CHECKPOINT OUT.gguf

It needs a virtual environment with `pip install gguf numpy`. The file has a made-up vocabulary,
because the runner passes token ids. The checkpoint's embeddings must be tied with its output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
_CHUNK = 4096  # rows that are quantized at once
Matrix = NDArray[np.float32]


def convert(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    is_supported = config["model_type"] == "llama" and config["tie_word_embeddings"]
    assert is_supported, "only Llama checkpoints with tied embeddings are supported"
    writer = gguf.GGUFWriter(out, "llama")
    _write_sizes(writer, config)
    for name, values in _tensors(checkpoint / "model.safetensors"):
        if name == "model.embed_tokens.weight":
            _add(writer, "token_embd.weight", values)
        elif name == "model.norm.weight":
            _add(writer, "output_norm.weight", values)
        elif name != "lm_head.weight":
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": "num_attention_heads"}.get(part, "num_key_value_heads")
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = _paired(values, config[heads])
            _add(writer, f"blk.{layer}.{NAMES[part]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _write_vocabulary(writer, config["vocab_size"])


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


def _tensors(path: Path) -> Iterator[tuple[str, Matrix]]:
    """Yields the names and values of a safetensors file in bf16, for which numpy has no type."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        start, end = entry["data_offsets"]
        upper = data[start:end].view(np.uint16).astype(np.uint32) << 16
        yield name, upper.view(np.float32).reshape(entry["shape"])


def _paired(values: Matrix, heads: int) -> Matrix:
    """Returns the rows of q or k with rotated dimensions side by side, not half a head apart."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add(writer: gguf.GGUFWriter, name: str, values: Matrix) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    chunks = (
        np.ascontiguousarray(values[at : at + _CHUNK]) for at in range(0, len(values), _CHUNK)
    )
    packed = np.concatenate([gguf.quants.quantize(chunk, Q8_0) for chunk in chunks])
    writer.add_tensor(name, packed, raw_dtype=Q8_0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.checkpoint, args.out)
