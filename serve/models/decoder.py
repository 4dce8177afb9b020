"""One plain decoder whose switches (ModelSpec) cover the families of the table.

Rows are packed along dim 0 whatever they are; only attention knows sequences. Every product
goes through a LinearOp, so precision is whatever made those; this file never names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from memory.attention import Attention, AttentionLayer
from ops.backend import Backend, LinearOp
from serve.models.rope import RotaryTable
from serve.models.spec import ModelSpec


class Norm(NamedTuple):
    """weight: [N]; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class LayerWeights:
    """One block. qkv gives q, k and v side by side; up gives gate and up side by side."""

    attn_norm: Norm
    qkv: LinearOp
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearOp
    mlp_norm: Norm
    up: LinearOp
    down: LinearOp


@dataclass(slots=True)
class DecoderWeights:
    """embed: [vocab, embed_size] and positions: [rows, hidden] stay in the file's dtype."""

    embed: Tensor
    positions: Tensor | None
    project_in: LinearOp | None
    layers: list[LayerWeights]
    final_norm: Norm | None
    project_out: LinearOp | None
    head: LinearOp


class Decoder:
    """Token ids to logits. K/V lives behind the attention seam, never here."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self._backend = backend
        self._rotary: RotaryTable | None = None
        if spec.rope is not None:
            self._rotary = RotaryTable(spec.rope, spec.max_model_len, device)

    def attention_layers(self) -> list[AttentionLayer]:
        return self.spec.attention_layers

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions: [T] int64 -> [T, hidden] after the final norm."""
        weights = self.weights
        x = self._embed(input_ids, positions)
        rotation = self._rotary.lookup(positions) if self._rotary is not None else None
        for index, layer in enumerate(weights.layers):
            x = self._block(index, layer, x, rotation, attention)
        return x if weights.final_norm is None else self._norm(x, weights.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] as `forward` returns it -> [R, vocab] fp32."""
        if self.weights.project_out is not None:
            hidden = self.weights.project_out(hidden)
        return self.weights.head(hidden).float()

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        weights = self.weights
        x = functional.embedding(input_ids, weights.embed).to(self.dtype)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            rows = positions + self.spec.position_offset
            x = x + functional.embedding(rows, weights.positions).to(self.dtype)
        return x

    def _block(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        attention: Attention,
    ) -> Tensor:
        if self.spec.is_post_norm:
            x = self._norm(x + self._attend(index, layer, x, rotation, attention), layer.attn_norm)
            return self._norm(x + self._mlp(layer, x), layer.mlp_norm)
        normed = self._norm(x, layer.attn_norm)
        x = x + self._attend(index, layer, normed, rotation, attention)
        return x + self._mlp(layer, self._norm(x, layer.mlp_norm))

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        attention: Attention,
    ) -> Tensor:
        """The seam gets q before k and v are touched, so that a remote one can start."""
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, spec.head_dim)
        q = self._position(qkv[:, :heads], layer.q_norm, rotation)
        ticket = attention.begin(index, q)
        k = self._position(qkv[:, heads : heads + kv_heads], layer.k_norm, rotation)
        out = attention.finish(ticket, k, qkv[:, heads + kv_heads :])
        return layer.o(out.reshape(x.shape[0], heads * spec.head_dim))

    def _position(
        self, x: Tensor, norm: Tensor | None, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """x: [T, H, D], a view with strided rows -> normalized per head and rotated."""
        if norm is not None:
            x = self._backend.rms_norm(x, norm, self.spec.norm_eps)
        if rotation is not None:
            x = self._backend.rotary(x, *rotation)
        return x

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        kind = self.spec.activation
        x = layer.up(x)
        if self.spec.is_gated:
            return layer.down(self._backend.gated_activation(x, kind))
        return layer.down(self._backend.activation(x, kind))

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        if self.spec.norm == "rms":
            return self._backend.rms_norm(x, norm.weight, self.spec.norm_eps)
        return self._backend.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)
