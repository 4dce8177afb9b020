"""One decoder whose switches (ModelSpec) cover all supported families.

Rows are packed along dim 0; only attention knows sequences. Every product is a LinearOp, which
determines the precision; this file names none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from memory.attention.seam import Attention, AttentionLayer
from ops.backend import Backend, LinearOp, Norm
from ops.linear import apply_norm
from ops.sharded import Columns
from serve.models.layers.blocks import Block, RowInputs
from serve.models.layers.draft_head import DraftHead, HeadWeights
from serve.models.layers.next_queries import foretelling
from serve.models.layers.rope import RotaryTable
from serve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table whose rows are looked up: [rows, width] in the file's type, or only this rank's
    columns of it. columns: None for all."""

    table: Tensor
    columns: Columns | None = None

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns [T, width] of `dtype` for rows: [T] int64."""
        found = functional.embedding(rows, self.table).to(dtype)
        # a copy, because an exchange's buffer is valid for a few results only
        return found if self.columns is None else self.columns.gather(found).clone()


@dataclass(slots=True)
class PerLayerTables:
    """Embeddings that blocks add after their MLPs (Gemma 4).

    embed: [vocab, layers * size]. project computes as much from the embeddings;
    norm: of each layer's part of it.
    """

    embed: Lookup
    project: LinearOp
    norm: Norm


class BlockStream(Protocol):
    """Brings the weights of blocks that are not all in memory."""

    def blocks(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Yields the blocks; the weights of one are in memory until the next is asked for."""

    def close(self) -> None:
        """Ends it; the model must not be computed any more."""


@dataclass(slots=True)
class DecoderWeights:
    """The weights of a model, or of a stage of it, which may lack the embedding or the head.

    embed: [vocab, embed_size], positions: [rows, hidden] in the file's type. The first product
    after the blocks (project_out or head) includes the final norm. final_norm is the head's, for
    callers that need the head's input. draft: those of a head that drafts. stream: what brings the
    weights of the blocks; None: they are in memory.
    """

    blocks: list[Block]
    embed: Callable[[Tensor, torch.dtype], Tensor] | None = None
    positions: Tensor | None = None
    project_in: LinearOp | None = None
    project_out: LinearOp | None = None
    head: LinearOp | None = None
    final_norm: Norm | None = None
    per_layer: PerLayerTables | None = None
    draft: HeadWeights | None = None
    stream: BlockStream | None = None


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


class StepModel(Protocol):
    """A model as the CPU's runner sees it; the methods are those of Decoder."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_head(self) -> DraftHead | None:
        """A head that was loaded with it."""

    def attention_layers(self) -> list[AttentionLayer]: ...

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor: ...

    def slices(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Slices: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def normed(self, hidden: Tensor) -> Tensor: ...


class StageModel(StepModel, Protocol):
    """A model, or a shard of it, as the ranks of a group see it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def head(self) -> LinearOp | None: ...

    @head.setter
    def head(self, op: LinearOp) -> None: ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        hidden: Tensor | None = None,
    ) -> Tensor: ...


class Decoder:
    """A decoder from token ids to logits. The attention object it is given holds the K/V."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        *,
        first_layer: int = 0,
        is_sharded: bool = False,
    ) -> None:
        """max_model_len: the longest context that is served; None: the model's. A stage of a model
        begins with first_layer; spec has its layers. is_sharded: results are buffers that other
        ranks write, too (ops/sharded.py)."""
        self._first_layer = first_layer
        self._is_sharded = is_sharded
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.max_model_len = max_model_len or spec.max_model_len
        # of each layer, the number of those with K/V before it
        has_kv = [layer.attention is not None for layer in spec.layers]
        self._kv_numbers = [sum(has_kv[:index]) for index in range(len(has_kv))]
        self._rotary = [RotaryTable(rope, self.max_model_len, device) for rope in spec.ropes]
        self._draft_head: DraftHead | None = None
        self._taken_at: frozenset[int] = frozenset()
        self._taken: dict[int, Tensor] = {}
        if weights.draft is not None:
            assert spec.draft_head is not None
            self.add_draft_head(DraftHead(spec.draft_head, weights.draft, self, self._rotary))

    @property
    def head(self) -> LinearOp | None:
        """The last product; None in a stage before the last one."""
        return self.weights.head

    @head.setter
    def head(self, op: LinearOp) -> None:
        self.weights.head = op

    @property
    def draft_head(self) -> DraftHead | None:
        return self._draft_head

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_kv_layers(self) -> int:
        """The layers that have K/V, without that of a head."""
        return sum([layer.attention is not None for layer in self.spec.layers])

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def final_norm(self) -> Norm | None:
        """The norm that the last product includes."""
        return self.weights.final_norm

    def add_draft_head(self, head: DraftHead) -> None:
        """Adds a head, whose K/V is a further layer. It is computed by those who draft with it."""
        self._draft_head = head
        self._taken_at = frozenset(head.spec.reads)
        self.spec = replace(self.spec, draft_head=head.spec)

    def attention_layers(self) -> list[AttentionLayer]:
        layers = zip(self.spec.layers, self.weights.blocks, strict=True)
        blocks = [block for layer, block in layers if layer.attention is not None]
        if self._draft_head is not None:
            blocks = [*blocks, self._draft_head.weights.block]
        return [
            replace(layer, sinks=block.attention.sinks)
            for layer, block in zip(self.spec.attention_layers, blocks, strict=True)
        ]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, hidden] before the final norm, for input_ids, positions: [T] int64.

        hidden: [T, hidden] of the stage before, for a stage that is not the first.
        """
        slices = self.slices(input_ids, positions, attention, hidden)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                result: Tensor = end.value
                return result

    def slices(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        hidden: Tensor | None = None,
    ) -> Slices:
        """Yields before each wait for attention, then returns `forward`'s result.

        Closing the generator abandons the pass.
        """
        x = self._embed(input_ids, positions) if hidden is None else hidden
        rotations = [table.lookup(positions) for table in self._rotary]
        per_layer = None
        if self.weights.per_layer is not None:
            embedded = x if hidden is None else self._embed(input_ids, positions)
            per_layer = self._per_layer_inputs(self.weights.per_layer, input_ids, embedded)
        inputs = RowInputs(rotations, positions, per_layer)
        blocks: Iterable[Block] = self.weights.blocks
        foretell = None
        if self.weights.stream is not None:
            blocks = self.weights.stream.blocks(self.weights.blocks)
        else:  # the next block's weights are in memory
            foretell = foretelling(
                self.weights.blocks, self._kv_numbers, inputs, attention, self._first_layer
            )
        for index, block in enumerate(blocks):
            if index in self._taken_at:
                self._taken[index] = x.clone()  # the block may overwrite it
            pending = block.attention.attend(self._kv_numbers[index], x, inputs, attention)
            yield
            number = self._first_layer + index
            x = block.finish(self.backend, pending.wait(), x, inputs, number, foretell)
        return x.clone() if self._is_sharded else x

    def taken_states(self, hidden: Tensor) -> list[Tensor]:
        """Returns the inputs of the layers that the draft head reads, [T, hidden] each, of the last
        pass, whose result is `hidden`."""
        assert self._draft_head is not None
        last = self.spec.num_layers
        return [hidden if at == last else self._taken[at] for at in self._draft_head.spec.reads]

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings [T, hidden] of tokens, for models without learned positions."""
        return self._embed(input_ids, input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [R, vocab] fp32 for hidden: [R, hidden] of `forward`."""
        if self.weights.project_out is not None:
            hidden = self.weights.project_out(hidden)
        assert self.weights.head is not None, "the last stage computes logits"
        logits = self.weights.head(hidden).float()
        cap = self.spec.logit_soft_cap
        return logits if cap == 0 else torch.tanh(logits / cap) * cap

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the head's input [R, embed_size] for hidden: [R, hidden] of `forward`."""
        if self.weights.project_out is not None:
            return self.weights.project_out(hidden)
        norm = self.weights.final_norm
        return hidden if norm is None else apply_norm(self.backend, hidden, norm)

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        weights = self.weights
        assert weights.embed is not None, "the first stage embeds"
        x = weights.embed(input_ids, self.dtype)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            rows = positions + self.spec.position_offset
            x = x + functional.embedding(rows, weights.positions).to(self.dtype)
        return x

    def _per_layer_inputs(self, tables: PerLayerTables, input_ids: Tensor, x: Tensor) -> Tensor:
        """Returns what blocks add after their MLPs, [layers, T, size], for embeddings x."""
        size = tables.norm.weight.shape[0]
        shape = (len(x), -1, size)
        embedded = tables.embed(input_ids, self.dtype).view(shape)
        projected: Tensor = self.backend.rms_norm(
            tables.project(x).view(shape), tables.norm.weight, tables.norm.eps
        )
        total: Tensor = (projected + embedded * size**0.5) * 2**-0.5
        return total.transpose(0, 1)
