"""Files for llama.cpp of models whose layers have states: their names, sizes and values.

What is expected is computed here from the checkpoint with torch, head by head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random

gguf = pytest.importorskip("gguf")

from bench.peers.convert_llama_cpp import convert  # noqa: E402  # it needs gguf

_NET = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def converted(
    folder: Path, config: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Returns the checkpoint's tensors, and the file's tensors and fields."""
    source, out = folder / "source", folder / "model.gguf"
    source.mkdir()
    write_random(source, config, "test", has_weights=True)
    tensors = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
    convert(source, out)
    reader = gguf.GGUFReader(out)
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return tensors, found, fields


def assert_equal(found: Any, expected: torch.Tensor) -> None:
    """Q8_0 has 255 steps for a block of 32 values."""
    assert found.shape == tuple(expected.shape)
    step = np.abs(expected.numpy()).max() / 127
    assert np.abs(found - expected.numpy()).max() <= 0.6 * step, (
        "half a step, and the scale in fp16"
    )


def test_lfm2(tmp_path: Path) -> None:
    tensors, found, fields = converted(tmp_path, config_of("tiny-convolutions"))
    assert fields["general.architecture"] == "lfm2"
    assert fields["lfm2.attention.head_count_kv"] == [0, 0, 2, 0], "convolutions have no K/V"
    assert fields["lfm2.shortconv.l_cache"] == 3
    assert fields["lfm2.feed_forward_length"] == 128
    assert "output.weight" not in found, "tied"
    for name, module in {
        "token_embd": "embed_tokens",
        "token_embd_norm": "embedding_norm",
        "blk.0.attn_norm": "layers.0.operator_norm",
        "blk.0.ffn_norm": "layers.0.ffn_norm",
        "blk.0.ffn_gate": "layers.0.feed_forward.w1",
        "blk.0.ffn_up": "layers.0.feed_forward.w3",
        "blk.0.ffn_down": "layers.0.feed_forward.w2",
        "blk.1.shortconv.in_proj": "layers.1.conv.in_proj",
        "blk.1.shortconv.out_proj": "layers.1.conv.out_proj",
        "blk.2.attn_q": "layers.2.self_attn.q_proj",
        "blk.2.attn_k_norm": "layers.2.self_attn.k_layernorm",
        "blk.2.attn_output": "layers.2.self_attn.out_proj",
    }.items():
        assert_equal(found[f"{name}.weight"], tensors[f"model.{module}.weight"])
    kernel = tensors["model.layers.3.conv.conv.weight"][:, 0]
    assert (found["blk.3.shortconv.conv.weight"] == kernel.numpy()).all(), "in fp32"
    assert len(found) == len(tensors)


def moved(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns six value heads, of which three have one key head, in llama.cpp's order."""
    heads = rows.split(dim)
    return torch.cat([heads[i] for i in (0, 3, 1, 4, 2, 5)])


def test_qwen35(tmp_path: Path) -> None:
    tensors, found, fields = converted(tmp_path, config_of("qwen3.5-0.8b") | _NET)
    assert fields["general.architecture"] == "qwen35"
    assert fields["qwen35.ssm.time_step_rank"] == 6
    assert fields["qwen35.ssm.group_count"] == 2
    assert fields["qwen35.ssm.inner_size"] == 6 * 32
    assert fields["qwen35.rope.dimension_count"] == 8
    net = {
        name.removeprefix("model.layers.1.linear_attn."): tensor
        for name, tensor in tensors.items()
        if ".1.linear_attn." in name
    }
    mixed, keys = net["in_proj_qkv.weight"], 2 * 2 * 32
    expected = torch.cat([mixed[:keys], moved(mixed[keys:], 32)])
    assert_equal(found["blk.1.attn_qkv.weight"], expected)
    kernel = net["conv1d.weight"][:, 0]
    expected = torch.cat([kernel[:keys], moved(kernel[keys:], 32)])
    assert (found["blk.1.ssm_conv1d.weight"] == expected.numpy()).all()
    assert_equal(found["blk.1.attn_gate.weight"], moved(net["in_proj_z.weight"], 32))
    assert_equal(found["blk.1.ssm_beta.weight"], moved(net["in_proj_b.weight"], 1))
    assert_equal(found["blk.1.ssm_alpha.weight"], moved(net["in_proj_a.weight"], 1))
    assert_equal(found["blk.1.ssm_out.weight"], moved(net["out_proj.weight"].T, 32).T)
    assert_equal(found["blk.1.ssm_norm.weight"], net["norm.weight"])
    assert found["blk.1.ssm_a"] == pytest.approx(-moved(net["A_log"].exp(), 1).numpy())
    assert (found["blk.1.ssm_dt.bias"] == moved(net["dt_bias"], 1).numpy()).all()
    norm = tensors["model.layers.3.post_attention_layernorm.weight"] + 1
    assert (found["blk.3.post_attention_norm.weight"] == norm.numpy()).all()
    assert_equal(found["blk.3.attn_q.weight"], tensors["model.layers.3.self_attn.q_proj.weight"])
    assert (found["output_norm.weight"] == tensors["model.norm.weight"].numpy() + 1).all()
    assert len(found) == len(tensors)
