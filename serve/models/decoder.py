"""One plain decoder whose switches (ModelSpec) cover the families of the table.

Rows are packed along dim 0 whatever they are; only attention knows sequences. Every product
goes through a LinearOp, so precision is whatever made those; this file never names one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from memory.attention.seam import Attention, AttentionLayer, Pending, Rotation
from ops.backend import Backend, LinearOp, Norm
from ops.linear import apply_norm
from serve.models.rope import RotaryTable
from serve.models.spec import ModelSpec


@dataclass(slots=True)
class LayerWeights:
    """One block. qkv gives q, k and v side by side, or k and v where q has a product of its own,
    to be there first; up is the MLP with its activation.

    In a pre-norm block qkv and up normalize what they read; in a post-norm one attn_norm and
    mlp_norm follow the sums.
    """

    q: LinearOp | None
    qkv: LinearOp
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearOp
    up: LinearOp
    down: LinearOp
    attn_norm: Norm | None = None
    mlp_norm: Norm | None = None


@dataclass(slots=True)
class DecoderWeights:
    """embed: [vocab, embed_size] and positions: [rows, hidden] stay in the file's dtype.

    The final norm is part of the first product after the blocks (project_out or head);
    final_norm is the head's, for who wants what the head reads.
    """

    embed: Tensor
    positions: Tensor | None
    project_in: LinearOp | None
    layers: list[LayerWeights]
    project_out: LinearOp | None
    head: LinearOp
    final_norm: Norm | None = None


Slices = Generator[None, None, Tensor]
"""A forward pass in pieces: it stops each time before it waits for attention, and returns what
`Decoder.forward` does."""


def take_turns(passes: Sequence[Slices]) -> list[Tensor]:
    """Several passes at once: while one waits for attention, the products of the others run.

    If one of them fails, the others are abandoned.
    """
    found: dict[int, Tensor] = {}
    running = list(enumerate(passes))
    try:
        while running:
            for turn in list(running):
                try:
                    next(turn[1])
                except StopIteration as end:
                    found[turn[0]] = end.value
                    running.remove(turn)
    finally:
        for one in passes:
            one.close()
    return [found[number] for number in range(len(passes))]


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
        self.device = device
        self._backend = backend
        self._rotary: RotaryTable | None = None
        if spec.rope is not None:
            self._rotary = RotaryTable(spec.rope, spec.max_model_len, device)

    def attention_layers(self) -> list[AttentionLayer]:
        return self.spec.attention_layers

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions: [T] int64 -> [T, hidden], before the final norm."""
        slices = self.slices(input_ids, positions, attention)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def slices(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Slices:
        """`forward`, with room for other work before each wait. Closing it abandons the pass."""
        x = self._embed(input_ids, positions)
        rotation = self._rotary.lookup(positions) if self._rotary is not None else None
        for index, layer in enumerate(self.weights.layers):
            pending = self._attend(index, layer, x, rotation, attention)
            yield
            x = self._block(layer, pending.wait().flatten(1), x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] as `forward` returns it -> [R, vocab] fp32."""
        if self.weights.project_out is not None:
            hidden = self.weights.project_out(hidden)
        return self.weights.head(hidden).float()

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] as `forward` returns it -> [R, embed_size], what the head reads."""
        if self.weights.project_out is not None:
            return self.weights.project_out(hidden)
        norm = self.weights.final_norm
        return hidden if norm is None else apply_norm(self._backend, hidden, norm)

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        weights = self.weights
        x = functional.embedding(input_ids, weights.embed).to(self.dtype)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            rows = positions + self.spec.position_offset
            x = x + functional.embedding(rows, weights.positions).to(self.dtype)
        return x

    def _block(self, layer: LayerWeights, attended: Tensor, x: Tensor) -> Tensor:
        """What follows attention. attended: [T, H * D]."""
        x = layer.o(attended, residual=x)
        if layer.attn_norm is not None:
            x = apply_norm(self._backend, x, layer.attn_norm)
        x = layer.down(layer.up(x), residual=x)
        if layer.mlp_norm is not None:
            x = apply_norm(self._backend, x, layer.mlp_norm)
        return x

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotation: Rotation | None,
        attention: Attention,
    ) -> Pending:
        """The seam gets q before k and v are touched, so that a remote one can start."""
        spec, rows = self.spec, x.shape[0]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        if layer.q is None:
            qkv, k_at = layer.qkv(x).view(rows, heads + 2 * kv_heads, dim), heads
            q = qkv[:, :heads]
        else:
            q = layer.q(x).view(rows, heads, dim)
        q = self._normed(q, layer.q_norm)
        if rotation is not None:
            q = self._backend.rotary(q, *rotation)
        ticket = attention.begin(index, q)
        if layer.q is not None:
            qkv, k_at = layer.qkv(x).view(rows, 2 * kv_heads, dim), 0
        k = self._normed(qkv[:, k_at : k_at + kv_heads], layer.k_norm)
        return attention.finish(ticket, k, qkv[:, k_at + kv_heads :], rotation)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """x: [T, H, D], a view with strided rows -> normalized per head."""
        return x if norm is None else self._backend.rms_norm(x, norm, self.spec.norm_eps)
