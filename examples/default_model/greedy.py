"""Generates greedy answers to many prompts at once, for the evaluation only.

Each layer has K/V tables [B, Hk, L, D]. Every row writes at its own positions and attends to
earlier ones, so prompts of different lengths share a batch, and padding is overwritten before a row
attends to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.default_model.model import Layer, Llama, rotary_tables, rotate


def greedy(model: Llama, prompts: list[list[int]], end: int, limit: int) -> list[list[int]]:
    """Returns at most `limit` tokens for each prompt, without the end token."""
    device = next(model.parameters()).device
    starts = torch.tensor([len(p) for p in prompts], device=device)
    width = int(starts.max())
    padded = torch.tensor([p + [end] * (width - len(p)) for p in prompts], device=device)
    state = _State(model, len(prompts), width + limit, device)
    positions = torch.arange(width, device=device).expand(len(prompts), -1)
    hidden = state.run(padded, positions)
    hidden = hidden[torch.arange(len(prompts), device=device), starts - 1]
    outputs: list[list[int]] = [[] for _ in prompts]
    is_running = [True] * len(prompts)
    for step in range(limit):
        tokens = model.logits(hidden).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            is_running[row] = is_running[row] and token != end
            if is_running[row]:
                outputs[row].append(token)
        if not any(is_running):
            break
        hidden = state.run(tokens[:, None], (starts + step)[:, None])[:, 0]
    return outputs


class _State:
    def __init__(self, model: Llama, rows: int, length: int, device: torch.device) -> None:
        shape = model.shape
        size = (rows, shape.num_key_value_heads, length, shape.head_dim)
        self.model = model
        self.tables = [
            (torch.zeros(size, device=device), torch.zeros(size, device=device))
            for _ in range(shape.num_hidden_layers)
        ]
        self.cos, self.sin = rotary_tables(shape, length, device)
        self.rows = torch.arange(rows, device=device)[:, None]
        self.keys = torch.arange(length, device=device)

    def run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the last hidden states, [B, T, hidden]. tokens, positions: [B, T]."""
        x = self.model.embed_tokens(tokens)
        for layer, (keys, values) in zip(self.model.layers, self.tables, strict=True):
            assert isinstance(layer, Layer)
            x = x + self._attend(layer, layer.input_layernorm(x), positions, keys, values)
            x = x + layer.feed_forward(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def _attend(
        self, layer: Layer, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        attention, dim = layer.self_attn, self.model.shape.head_dim
        batch, length, _ = x.shape
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        q = rotate(attention.q_proj(x).view(batch, length, -1, dim).transpose(1, 2), cos, sin)
        k = rotate(attention.k_proj(x).view(batch, length, -1, dim).transpose(1, 2), cos, sin)
        keys[self.rows, :, positions] = k.transpose(1, 2)
        values[self.rows, :, positions] = attention.v_proj(x).view(batch, length, -1, dim)
        mask = self.keys <= positions[:, None, :, None]
        group = q.shape[1] // keys.shape[1]
        out = F.scaled_dot_product_attention(
            q,
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            attn_mask=mask,
        )
        return attention.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
