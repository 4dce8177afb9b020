"""The Llama of the small model in plain torch, with Hugging Face's names of weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.vocabulary import BOS, END, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, by the names of config.json."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 8192
    # So long that most of a head's dimensions hardly turn within the context: they compare words,
    # while the first few tell neighbours apart.
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-5

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """Reads config.json."""
        config = json.loads((directory / "config.json").read_text())
        return cls(**{name: config[name] for name in asdict(cls())})

    def config(self) -> dict[str, Any]:
        """Returns what config.json says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "bos_token_id": BOS,
            "eos_token_id": END,
            **asdict(self),
        }


# Up to this length plain products train faster on a CPU than the blocks of a long attention.
SHORT = 256


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        rows, kv_rows = (
            shape.num_attention_heads * shape.head_dim,
            shape.num_key_value_heads * shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [B, heads, T, D] and k and v [B, K/V heads, T, D]; q and k are rotated."""
        parts = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            y = projection(x)
            parts.append(y.view(*y.shape[:2], -1, self._shape.head_dim).transpose(1, 2))
        return rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), parts[2]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        y = _short_attention(q, k, v) if x.shape[1] <= SHORT else _long_attention(q, k, v)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Gated(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """The whole model; its state dict is a checkpoint of Hugging Face's LlamaForCausalLM."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype = torch.float32) -> Network:
        """Reads a checkpoint."""
        from safetensors.torch import load_file

        network = cls(Shape.read(directory))
        network.load_state_dict(load_file(directory / "model.safetensors"))
        return network.to(dtype).eval()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the normalized hidden states of tokens [B, T]."""
        x = self.model.embed_tokens(tokens)
        cos, sin = angles(self.shape, torch.arange(tokens.shape[1]))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits; the embeddings are the weights of the last product, too."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def _short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends with the whole matrix of scores: q [B, heads, T, D], k and v [B, K/V heads, T, D]."""
    size, kv_heads, length, width = k.shape
    share = q.shape[1] // kv_heads
    scores: Tensor = q.reshape(size, kv_heads, share * length, width) @ k.transpose(-1, -2)
    mask = torch.full((length, length), -1e9, dtype=scores.dtype).triu(1)
    scores = scores.view(size, kv_heads, share, length, length) * width**-0.5 + mask
    y: Tensor = scores.softmax(-1).view(size, kv_heads, share * length, length).to(v.dtype) @ v
    return y.view(size, kv_heads * share, length, width)


def _long_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def angles(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines [T, head_dim] of the rotations at positions."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = positions[:, None].float() * shape.rope_theta**-half
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of dimensions half a head apart."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
