"""A plain Llama in torch for training, with the parameter names of Hugging Face.

It has no cache and no sampling, and computes the loss only at positions with a weight. With experts
the MLP is Mixtral's: each token is computed by the top_k experts of a router.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"silu": F.silu, "relu": F.relu}
BALANCE = 0.01  # weight of the loss that spreads tokens over experts (Switch Transformer)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes by the names of config.json. intermediate_size: of one expert, if there are some."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    num_local_experts: int = 0
    num_experts_per_tok: int = 0

    def as_dict(self) -> dict[str, int | float | str]:
        """Returns the fields of config.json."""
        return {name: value for name, value in asdict(self).items() if value}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [length, head_dim]."""
    half = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with rotary embeddings applied. x: [B, H, T, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        dim = self.shape.head_dim
        q = self.q_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.activation = ACTIVATIONS[shape.hidden_act]
        self.activations = torch.zeros(())  # of the last call, which a loss can make small

    def forward(self, x: Tensor) -> Tensor:
        self.activations = self.activation(self.gate_proj(x))
        return self.down_proj(self.activations * self.up_proj(x))


class Expert(nn.Module):
    """An MLP with Mixtral's names: w1 is the gate, w3 up and w2 down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.activation = ACTIVATIONS[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Experts, of which each token is computed by those with the largest products of the router,
    weighted with the softmax of these."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.num_experts_per_tok
        self.gate = nn.Linear(shape.hidden_size, shape.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.num_local_experts))
        self.imbalance = torch.zeros(())  # of the last call, 1 if all experts have as many tokens

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares = self.gate(rows).float().softmax(-1)
        weights, chosen = shares.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=shares.shape[1]) / chosen.numel()
        self.imbalance = shares.shape[1] * (counts * shares.mean(0)).sum()
        out = torch.zeros_like(rows, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            of, slot = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, of, expert(rows[of]).float() * weights[of, slot, None])
        return out.to(x.dtype).view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if shape.num_local_experts:
            self.block_sparse_moe = Mixture(shape)
        else:
            self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.feed_forward(self.post_attention_layernorm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.block_sparse_moe(x) if hasattr(self, "block_sparse_moe") else self.mlp(x)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def init_weights(self) -> None:
        deep = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            is_output = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
            nn.init.normal_(weight, std=0.02 * (deep if is_output else 1.0))

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the last hidden states, [B, T, hidden]. tokens, documents: [B, T].

        A token attends only to earlier tokens of its own document and to itself."""
        cos, sin = rotary_tables(self.shape, tokens.shape[1], tokens.device)
        mask = None
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same & torch.ones_like(same[:1]).tril()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)

    def loss(self, tokens: Tensor, documents: Tensor, weights: Tensor, sparse: float = 0) -> Tensor:
        """Returns the weighted cross-entropy, with what experts add. weights: [B, T], of predicting
        each token; sparse: of the mean of the activations (L1, as in ProSparse)."""
        hidden = self.hidden(tokens, documents)[:, :-1]
        kept = weights[:, 1:] > 0
        logits = self.logits(hidden[kept]).float()
        each = F.cross_entropy(logits, tokens[:, 1:][kept], reduction="none")
        weight = weights[:, 1:][kept]
        loss = (each * weight).sum() / weight.sum()
        for part in self.modules():
            if isinstance(part, Mixture):
                loss = loss + BALANCE * part.imbalance
            elif isinstance(part, MLP) and sparse:
                loss = loss + sparse * part.activations.float().abs().mean()
        return loss
