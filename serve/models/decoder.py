"""One decoder whose switches (ModelSpec) cover all supported families.

Rows are packed along dim 0; only attention knows sequences. Every product is a LinearOp, which
determines the precision; this file names none.
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
    """The weights of one block.

    qkv computes q, k and v side by side, or only k and v if q has a product of its own, which runs
    first; up includes the MLP's activation. In a pre-norm block qkv and up normalize their input;
    in a post-norm block attn_norm and mlp_norm follow the residual sums.
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
    """The weights of a model. embed: [vocab, embed_size], positions: [rows, hidden], in file dtype.

    The first product after the blocks (project_out or head) includes the final norm. final_norm is
    the head's, for callers that need the head's input.
    """

    embed: Tensor
    positions: Tensor | None
    project_in: LinearOp | None
    layers: list[LayerWeights]
    project_out: LinearOp | None
    head: LinearOp
    final_norm: Norm | None = None


Slices = Generator[None, None, Tensor]
"""A pass that yields before each wait for attention and returns `Decoder.forward`'s result."""


def run_interleaved(passes: Sequence[Slices]) -> list[Tensor]:
    """Runs several passes interleaved: while one waits for attention, others compute products.

    If one fails, all are closed. Returns their results in order.
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
    """A decoder from token ids to logits. The attention object it is given holds the K/V."""

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
        """Returns [T, hidden] before the final norm, for input_ids, positions: [T] int64."""
        slices = self.slices(input_ids, positions, attention)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def slices(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Slices:
        """Yields before each wait for attention, then returns `forward`'s result.

        Closing the generator abandons the pass.
        """
        x = self._embed(input_ids, positions)
        rotation = self._rotary.lookup(positions) if self._rotary is not None else None
        for index, layer in enumerate(self.weights.layers):
            pending = self._attend(index, layer, x, rotation, attention)
            yield
            x = self._block(layer, pending.wait().flatten(1), x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [R, vocab] fp32 for hidden: [R, hidden] of `forward`."""
        if self.weights.project_out is not None:
            hidden = self.weights.project_out(hidden)
        return self.weights.head(hidden).float()

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the head's input [R, embed_size] for hidden: [R, hidden] of `forward`."""
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
        """Computes the part of a block after attention. attended: [T, H * D]."""
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
        """Passes q to attention before k and v are computed, so that memory nodes can start."""
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
        """Returns x: [T, H, D], which may have strided rows, normalized per head."""
        return x if norm is None else self._backend.rms_norm(x, norm, self.spec.norm_eps)
