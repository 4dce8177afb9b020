"""Builds the weights of a decoder from a source of tensors, which may only note what is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.backend import Backend, Fusion, LinearOp, Norm
from serve.models.assemble_latent import LatentAssembler
from serve.models.assemble_mlp import MlpAssembler
from serve.models.decoder import DecoderWeights, Lookup, PerLayerTables
from serve.models.families.head_spec import MTP, HeadSpec
from serve.models.families.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, QKNorm
from serve.models.families.names import MtpNames, WeightNames
from serve.models.layers.blocks import (
    AttentionHalf,
    AttentionWeights,
    Block,
    NoAttention,
    NoMlp,
    PerLayerInput,
)
from serve.models.layers.draft_head import HeadWeights
from serve.models.parts import Part, Rows, head_rows
from serve.models.shard import WHOLE, Shard
from serve.models.spec import ModelSpec
from serve.models.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a checkpoint keeps a model: the prefix of its tensors, and the head's module (None: the
    embedding is the head)."""

    prefix: str
    head: str | None


class Assembler:
    """Builds one model, or a shard of it. q_first: q has a product of its own, so that memory nodes
    start earlier."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        stored: Stored,
        source: TensorSource,
        backend: Backend,
        *,
        q_first: bool,
        shard: Shard = WHOLE,
        mtp: MtpNames | None = None,
    ) -> None:
        self._shard = shard
        self._spec = spec
        self._names = names
        self._stored = stored
        self._source = source
        self._backend = backend
        self._q_first = q_first
        self._rotations = {rope: index for index, rope in enumerate(shard.spec(spec).ropes)}
        self._num_states = 0
        self._mtp = mtp or MtpNames()

    def decoder(self, layers: Iterable[int]) -> DecoderWeights:
        """Builds everything; layers yields the numbers of the shard's layers."""
        spec, shard, prefix = self._spec, self._shard, self._stored.prefix
        weights = DecoderWeights(blocks=[])
        if shard.is_first(spec.num_layers) or spec.per_layer_vocab:
            self._add_embedding(weights)
        for index in layers:
            at = prefix + self._names.layer.format(index)
            weights.blocks.append(self.block(spec.layers[index], at))
            self._source.end_layer()
        if shard.is_last(spec.num_layers):
            self._add_head(weights)
        if spec.per_layer_vocab:
            weights.per_layer = self._per_layer_tables(prefix)
        if spec.draft_head is not None and spec.draft_head.kind == MTP:
            weights.draft = self._mtp_layer(spec.draft_head)
        return weights

    def _mtp_layer(self, head: HeadSpec) -> HeadWeights:
        """Builds an MTP layer. The embedding and the head that many checkpoints store with it are
        those of the model."""
        names, join_in = self._mtp, 2 * head.hidden_size
        behind = self._stored.prefix + self._names.layer.format(self._spec.num_layers)
        at = behind if names.at is None else names.at
        return HeadWeights(
            block=self.block(head.layer, behind if names.block is None else names.block),
            join=self._source.product([Part(at + names.join, head.hidden_size)], join_in),
            embed_norm=self.norm(at + names.embed_norm),
            state_norm=self.norm(at + names.state_norm),
            final_norm=self.norm(at + names.final_norm),
        )

    def _add_embedding(self, weights: DecoderWeights) -> None:
        """Adds what turns token ids into the first hidden state. A rank has some columns of the
        embedding, and all of the rest."""
        spec, names, prefix = self._spec, self._names, self._stored.prefix
        shape = spec.vocab_size, spec.embed_size
        weights.embed = self._lookup(f"{prefix}{names.embed}.weight", *shape)
        if spec.num_positions:
            shape = spec.num_positions, spec.hidden_size
            weights.positions = self._source.table(f"{prefix}{names.positions}.weight", shape)
        if spec.embed_size != spec.hidden_size:
            inner = Part(prefix + names.project_in, spec.hidden_size)
            weights.project_in = self._source.product([inner], spec.embed_size)

    def _lookup(self, name: str, num_rows: int, width: int) -> Lookup:
        shard = self._shard
        columns = shard.columns(width) if shard.size > 1 else None
        own = None if columns is None else columns.own
        return Lookup(self._source.table(name, (num_rows, width), columns=own), columns)

    def _add_head(self, weights: DecoderWeights) -> None:
        """Adds what turns the last hidden state into logits."""
        spec, names, prefix, shard = self._spec, self._names, self._stored.prefix, self._shard
        norm = self.norm(prefix + names.final_norm) if spec.has_final_norm else None
        if spec.embed_size != spec.hidden_size:
            outer = Part(prefix + names.project_out, spec.embed_size)
            fusion = Fusion(norm)
            weights.project_out = self._source.product([outer], spec.hidden_size, fusion=fusion)
            norm = None
        weights.final_norm = norm
        module = self._stored.head or f"{prefix}{names.embed}"
        head = self._source.product(
            [shard.part(Part(module, spec.vocab_size))],
            spec.embed_size,
            has_bias=spec.has_head_bias,
            fusion=Fusion(norm),
            scale=spec.logit_scale,
            is_head=True,
        )
        weights.head = shard.linear(head, spec.vocab_size)

    def _per_layer_tables(self, prefix: str) -> PerLayerTables:
        spec = self._spec
        size = spec.layers[0].per_layer_input
        width = size * spec.num_layers
        project = Part(f"{prefix}per_layer_model_projection", width)
        return PerLayerTables(
            embed=self._lookup(
                f"{prefix}embed_tokens_per_layer.weight", spec.per_layer_vocab, width
            ),
            project=self._source.product([project], spec.hidden_size, scale=spec.hidden_size**-0.5),
            norm=self.norm(f"{prefix}per_layer_projection_norm", size),
        )

    def block(self, layer: LayerSpec, at: str, num_in: int | None = None) -> Block:
        """Builds a block whose tensors' names begin with `at`. num_in: the size of what attention
        reads; None: the hidden size."""
        names, norms = self._names, layer.norms
        attn_in = self.norm(at + names.attn_in) if "attn_in" in norms else None
        mlp_in = attn_in if layer.is_parallel else None
        if "mlp_in" in norms:
            mlp_in = self.norm(at + names.mlp_in)
        mlps = MlpAssembler(self._spec, names, self._source, self._backend, self.norm, self._shard)
        after = {
            place: self.norm(at + getattr(names, place)) if place in norms else None
            for place in ("attn_out", "mlp_out", "attn_sum", "mlp_sum")
        }
        per_layer = self._per_layer_input(layer, at) if layer.per_layer_input else None
        scalar = self._source.vector(at + names.scalar, (1,)) if layer.has_scalar else None
        return Block(
            attention=self._first_half(layer, at, Fusion(attn_in), num_in),
            mlp=NoMlp() if layer.mlp is None else mlps.mlp(layer.mlp, at, mlp_in),
            is_parallel=layer.is_parallel,
            per_layer=per_layer,
            scalar=scalar,
            is_plain=not (norms & set(after) or layer.is_parallel or layer.per_layer_input)
            and not layer.has_scalar,
            **after,
        )

    def _per_layer_input(self, layer: LayerSpec, at: str) -> PerLayerInput:
        size, hidden = layer.per_layer_input, self._spec.hidden_size
        assert layer.mlp is not None, "it is added after an MLP"
        mlp = layer.mlp if isinstance(layer.mlp, MlpSpec) else layer.mlp.expert
        gate, project = f"{at}per_layer_input_gate", f"{at}per_layer_projection"
        fusion = Fusion(None, mlp.activation)
        return PerLayerInput(
            gate=self._source.product([Part(gate, size)], hidden, fusion=fusion),
            project=self._source.product([Part(project, hidden)], size),
            norm=self.norm(f"{at}post_per_layer_input_norm"),
        )

    # -- attention

    def _first_half(
        self, layer: LayerSpec, at: str, fusion: Fusion, num_in: int | None
    ) -> AttentionHalf:
        """Builds attention, a layer with a state, both, or nothing."""
        half: AttentionHalf = NoAttention()
        if layer.attention is not None:
            half = self._attention(layer.attention, at, fusion, num_in)
        if layer.state is None:
            return half
        from serve.models.assemble_state import StateAssembler  # only some models need it
        from serve.models.layers.state import Beside

        spec = self._spec
        states = StateAssembler(
            self._names.state,
            at,
            spec.hidden_size,
            self._source,
            self._backend,
            out_scale=spec.residual_scale,
        )
        state = states.half(layer.state, self._num_states, fusion)
        self._num_states += 1
        if layer.attention is None:
            return state
        return Beside(half, state, layer.state.out_size)

    def _attention(
        self, spec: AttentionSpec | LatentSpec, at: str, fusion: Fusion, num_in: int | None
    ) -> AttentionHalf:
        rotation = None if spec.rope is None else self._rotations[spec.rope]
        if isinstance(spec, LatentSpec):
            latent = LatentAssembler(
                self._spec, spec, self._names, at, self._source, self._backend, self._shard
            )
            return latent.attention(fusion, rotation, q_first=self._q_first)
        hidden, source, shard = self._spec.hidden_size, self._source, self._shard
        num_in = num_in or hidden
        own = shard.attention(spec)
        assert isinstance(own, AttentionSpec)
        q, kv = self._qkv_parts(spec, at)
        q = [shard.heads(part, spec.num_heads) for part in q]
        kv = [shard.heads(part, spec.num_kv_heads) for part in kv]
        q_op: LinearOp | None = None
        kv_op: LinearOp | None = None
        if self._q_first or not kv:
            q_op = source.product(q, num_in, has_bias=spec.has_qkv_bias, fusion=fusion)
            if kv:
                kv_op = source.product(kv, num_in, has_bias=spec.has_qkv_bias, fusion=fusion)
        else:
            kv_op = source.product(
                _merged([*q, *kv]), num_in, has_bias=spec.has_qkv_bias, fusion=fusion
            )
        o = source.product(
            [shard.part(Part(at + self._names.o, hidden))],
            spec.q_size,
            has_bias=spec.has_o_bias,
            scale=self._spec.residual_scale * spec.out_scale,
        )
        weights = AttentionWeights(
            spec=own,
            backend=self._backend,
            norm_eps=self._spec.norm_eps,
            q=q_op,
            qkv=kv_op,
            o=shard.linear(o, hidden, num_in=spec.q_size, in_unit=own.q_size),
            rotation=rotation,
        )
        self._add_qk_norms(weights, spec, at)
        if spec.has_v_norm and spec.shares is None:
            weights.v_norm = source.ones(spec.head_dim)
        if spec.has_gate:
            gate = Part(at + self._names.gate, spec.q_size)
            if spec.is_gate_in_q:
                gate = Part(at + self._names.qkv[0], 2 * spec.q_size, _half_rows(spec, 1))
            gate = shard.heads(gate, spec.num_heads)
            weights.gate = source.product([gate], hidden, fusion=fusion)
        if spec.has_sinks:
            sinks = source.vector(at + self._names.sinks, (spec.num_heads,), dtype=torch.float32)
            if sinks is not None:
                first = shard.rank * own.num_heads
                weights.sinks = tuple(sinks[first : first + own.num_heads].tolist())
        return weights

    def _add_qk_norms(self, weights: AttentionWeights, spec: AttentionSpec, at: str) -> None:
        norm, shard, own = spec.qk_norm, self._shard, weights.spec
        if norm is None:
            return
        weights.q_norm = self._qk_norm(spec, norm, at + self._names.q_norm, spec.num_heads)
        if spec.shares is None:
            weights.k_norm = self._qk_norm(spec, norm, at + self._names.k_norm, spec.num_kv_heads)
        if shard.size == 1:
            return
        if norm.scope == "all":  # a norm over all heads reads whole rows
            weights.q_columns = shard.columns(spec.q_size, own.q_size)
            weights.k_columns = shard.columns(spec.kv_size, own.kv_size)
        elif norm.scope == "each":
            weights.q_norm = shard.own_rows(weights.q_norm)
            weights.k_norm = shard.own_rows(weights.k_norm)

    def _qkv_parts(self, spec: AttentionSpec, at: str) -> tuple[list[Part], list[Part]]:
        """Returns the parts of q, and those of k and v; none where K/V is another layer's."""
        q_size, kv_size, modules = spec.q_size, spec.kv_size, self._names.qkv
        q_rows, k_rows = (
            _rotation_rows(spec, spec.num_heads),
            _rotation_rows(spec, spec.num_kv_heads),
        )
        if len(modules) == 3:
            q = [Part(at + modules[0], q_size, q_rows)]
            if spec.is_gate_in_q:
                assert q_rows is None, "its rotations are not interleaved"
                q = [Part(at + modules[0], 2 * q_size, _half_rows(spec, 0))]
            kv = [Part(at + modules[1], kv_size, k_rows), Part(at + modules[2], kv_size)]
        else:
            module, total = at + modules[0], q_size + 2 * kv_size
            k_end = q_size + kv_size
            q = [Part(module, total, slice(q_size) if q_rows is None else q_rows)]
            k_slice: Rows = slice(q_size, k_end) if k_rows is None else k_rows + q_size
            kv = [Part(module, total, k_slice), Part(module, total, slice(k_end, total))]
        if spec.shares is not None:
            kv = []
        return q, kv[:1] if spec.is_v_k else kv

    def _qk_norm(self, spec: AttentionSpec, norm: QKNorm, name: str, num_heads: int) -> Tensor:
        """Returns the norm's weight with its values in the order of q's and k's rows."""
        dim, source = spec.head_dim, self._source
        if not norm.has_weight:
            return source.ones(dim)
        shape = {"head": (dim,), "all": (num_heads * dim,), "each": (num_heads, dim)}[norm.scope]
        offset = self._spec.norm_offset
        if norm.scope == "each" and not source.has(f"{name}.weight"):
            rows = [
                source.vector(f"{name}.norms.{head}.weight", (dim,), offset=offset)
                for head in range(num_heads)
            ]
            weight = None if rows[0] is None else torch.stack(rows)
        else:
            weight = source.vector(f"{name}.weight", shape, offset=offset)
        order = _rotation_rows(spec, num_heads)
        if order is None or weight is None or norm.follows_rope:
            return weight
        order = order.to(weight.device)
        return weight[order] if norm.scope == "all" else weight[..., order[:dim]]

    def norm(self, name: str, size: int | None = None) -> Norm:
        spec, source = self._spec, self._source
        shape = (spec.hidden_size if size is None else size,)
        if not spec.has_norm_weight:
            return Norm(spec.norm, source.ones(shape[0]), None, spec.norm_eps)
        bias = source.vector(f"{name}.bias", shape) if spec.has_norm_bias else None
        weight = source.vector(f"{name}.weight", shape, offset=spec.norm_offset)
        return Norm(spec.norm, weight, bias, spec.norm_eps)


def _merged(parts: list[Part]) -> list[Part]:
    """Returns one part where the parts are all rows of one tensor in their order."""
    first = parts[0]
    end = 0
    for part in parts:
        if part.module != first.module or not isinstance(part.rows, slice):
            return parts
        if (part.rows.start or 0) != end:
            return parts
        end = part.rows.stop
    return [Part(first.module, first.num_rows)] if end == first.num_rows else parts


def _rotation_rows(spec: AttentionSpec, num_heads: int) -> Tensor | None:
    """Returns the rows of q or k that put the pairs of an interleaved RoPE side by side."""
    if spec.rope is None or not spec.rope.is_interleaved:
        return None
    return head_rows(num_heads, 0, spec.rope.dim, spec.head_dim)


def _half_rows(spec: AttentionSpec, half: int) -> Tensor:
    """Returns the rows of one half of each head, where heads have twice their rows."""
    heads = torch.arange(spec.num_heads)[:, None] * 2 * spec.head_dim
    return (heads + half * spec.head_dim + torch.arange(spec.head_dim)).flatten()
