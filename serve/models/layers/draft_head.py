"""Computes a head that drafts.

Row i of a head reads the model's hidden state of the token at position i and the embedding of the
token at i + 1, and gives a state from which the token at i + 2 is predicted. To draft further, the
head reads its own state in place of the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memory.attention.seam import Attention
from ops.backend import Backend, LinearOp, Norm
from ops.linear import apply_norm
from serve.models.families.head_spec import MTP, HeadSpec
from serve.models.layers.blocks import Block, RowInputs
from serve.models.layers.rope import RotaryTable


@dataclass(slots=True)
class HeadWeights:
    """The weights of a head.

    join: of an MTP layer, from embedding and state side by side to the block's input; of an EAGLE-3
    head, from the model's states that it reads to one. embed_norm, state_norm: of the two inputs.
    final_norm, of MTP: before the model's head. head: an EAGLE-3 head's own, which includes its
    norm. embed: [vocab, hidden], None for the model's. token_ids: [vocab] int64, the model's token
    of each of its own; None if they are the same.
    """

    block: Block
    join: LinearOp
    embed_norm: Norm
    state_norm: Norm
    final_norm: Norm | None = None
    head: LinearOp | None = None
    embed: Tensor | None = None
    token_ids: Tensor | None = None


class Target(Protocol):
    """The model beside a head: a Decoder."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def final_norm(self) -> Norm | None: ...

    def normed(self, hidden: Tensor) -> Tensor: ...

    def taken_states(self, hidden: Tensor) -> list[Tensor]: ...

    def embed_tokens(self, input_ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftHead:
    """A head beside `model`. Its block is the layer of attention behind the model's."""

    def __init__(
        self, spec: HeadSpec, weights: HeadWeights, model: Target, rotary: list[RotaryTable]
    ) -> None:
        """rotary: the tables that its block needs."""
        self.spec = spec
        self.weights = weights
        self._model = model
        self._rotary = rotary
        self._is_mtp = spec.kind == MTP
        self.device = model.device
        self._ratio: Tensor | None = None
        if self._is_mtp:
            self._ratio = self._ratio_of_norms()

    def _ratio_of_norms(self) -> Tensor:
        """Returns the factors, [hidden], from what the model's own norm gives back to what the
        head's gave.
        The model's last product, which is not stored twice, includes its norm."""
        norm = self._model.final_norm
        assert norm is not None and norm.kind == "rms", "families with MTP layers have RMSNorm"
        weight = norm.weight.float()
        return torch.where(weight == 0, torch.zeros_like(weight), 1.0 / weight)

    @property
    def taken_width(self) -> int:
        """The columns of what take() returns."""
        return self._model.hidden_size * max(1, len(self.spec.reads))

    def take(self, hidden: Tensor) -> Tensor:
        """Returns the model's states of its last pass that read() needs, [T, any]. hidden: the
        result of the pass."""
        if self._is_mtp:
            return hidden
        return torch.cat(self._model.taken_states(hidden), dim=1)

    def read(self, taken: Tensor) -> Tensor:
        """Returns what the head reads of the rows that were taken, [T, hidden_size]."""
        return self._model.normed(taken) if self._is_mtp else self.weights.join(taken)

    def forward(
        self, next_ids: Tensor, positions: Tensor, states: Tensor, attention: Attention
    ) -> Tensor:
        """Returns the states, [T, hidden_size], that logits() and the next forward() read.

        next_ids: [T] int64, the token after each row's; positions: [T] int64, of the rows; states:
        [T, hidden_size], what read() or forward() gave for them.
        """
        weights, model = self.weights, self._model
        backend = model.backend
        if weights.embed is None:
            embedded = model.embed_tokens(next_ids)
        else:
            embedded = torch.nn.functional.embedding(next_ids, weights.embed).to(states.dtype)
        embedded = apply_norm(backend, embedded, weights.embed_norm)
        normed = apply_norm(backend, states, weights.state_norm)
        x = torch.cat((embedded.to(states.dtype), normed.to(states.dtype)), dim=1)
        if self._is_mtp:
            x = residual = weights.join(x).to(model.dtype)
        else:  # blocks may overwrite the residual
            residual = normed if self.spec.is_residual_normed else states
            residual = residual.to(model.dtype, copy=True)
        inputs = RowInputs([table.lookup(positions) for table in self._rotary], positions)
        pending = weights.block.attention.attend(model.num_kv_layers, x, inputs, attention)
        x = weights.block.finish(backend, pending.wait(), residual, inputs, model.num_layers)
        if weights.final_norm is not None:
            x = apply_norm(backend, x, weights.final_norm)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Returns [R, vocab of the model] fp32 for states: [R, hidden_size] of forward(). Tokens
        that the head does not have get -inf."""
        if self._ratio is not None:
            x = states * self._ratio.to(states.dtype)
            norm = self._model.final_norm
            assert norm is not None
            scale = torch.sqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
            return self._model.logits(x) * scale
        assert self.weights.head is not None
        own = self.weights.head(states).float()
        if self.weights.token_ids is None:
            return own
        logits = own.new_full((len(own), self._model.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.weights.token_ids, own)
