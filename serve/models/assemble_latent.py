"""Builds latent attention from a source of tensors."""

from __future__ import annotations

from torch import Tensor

from ops.backend import Backend, Fusion, HeadsOp
from serve.models.families.layer_spec import LatentSpec
from serve.models.families.names import WeightNames
from serve.models.layers.latent import LatentAttention
from serve.models.parts import Part, head_rows
from serve.models.shard import Shard
from serve.models.spec import ModelSpec
from serve.models.tensors import TensorSource


class LatentAssembler:
    """Builds the attention of one block, whose tensors' names begin with `at`."""

    def __init__(
        self,
        model: ModelSpec,
        spec: LatentSpec,
        names: WeightNames,
        at: str,
        source: TensorSource,
        backend: Backend,
        shard: Shard,
    ) -> None:
        self._shard = shard
        self._model = model
        self._spec = spec
        self._names = names
        self._at = at
        self._source = source
        self._backend = backend

    def attention(self, fusion: Fusion, rotation: int | None, *, q_first: bool) -> LatentAttention:
        """fusion: the norm of the block's input."""
        spec, source, names, shard = self._spec, self._source, self._names.latent, self._shard
        own = shard.attention(spec)
        assert isinstance(own, LatentSpec)
        hidden, head_dim = self._model.hidden_size, spec.nope_dim + spec.rope_dim
        kv_size = spec.kv_rank + spec.rope_dim
        q_rows = _head_order(spec, spec.num_heads, spec.nope_dim)
        kv = Part(self._at + names.kv_down, kv_size, _head_order(spec, 1, spec.kv_rank))
        q_norm = q_up = None
        if spec.q_rank is None:
            q = Part(self._at + names.q, spec.num_heads * head_dim, q_rows)
            q = shard.heads(q, spec.num_heads)
        else:
            q = Part(self._at + names.q_down, spec.q_rank)
            q_norm = source.vector(f"{self._at}{names.q_norm}.weight", (spec.q_rank,))
            up = Part(self._at + names.q_up, spec.num_heads * head_dim, q_rows)
            q_up = source.product([shard.heads(up, spec.num_heads)], spec.q_rank)
        inputs = q_down = kv_down = None
        # a query of full rank has no bias, so the two cannot be one product with biases
        is_split = q_first or (spec.has_bias and spec.q_rank is None)
        if is_split:
            has_q_bias = spec.has_bias and spec.q_rank is not None
            q_down = source.product([q], hidden, has_bias=has_q_bias, fusion=fusion)
            kv_down = source.product([kv], hidden, has_bias=spec.has_bias, fusion=fusion)
        else:
            inputs = source.product([q, kv], hidden, has_bias=spec.has_bias, fusion=fusion)
        absorb, expand = self._head_products()
        v_size = spec.num_heads * spec.v_dim
        o = source.product(
            [shard.part(Part(self._at + self._names.o, hidden))],
            v_size,
            has_bias=spec.has_bias,
            scale=self._model.residual_scale,
        )
        return LatentAttention(
            spec=own,
            backend=self._backend,
            inputs=inputs,
            q_down=q_down,
            kv_down=kv_down,
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=source.vector(f"{self._at}{names.kv_norm}.weight", (spec.kv_rank,)),
            absorb=absorb,
            expand=expand,
            o=shard.linear(o, hidden, num_in=v_size, in_unit=own.num_heads * spec.v_dim),
            rotation=rotation,
        )

    def _head_products(self) -> tuple[HeadsOp, HeadsOp]:
        """Returns the expansion of the latent to this rank's heads: of keys, transposed, and of
        values."""
        spec, source = self._spec, self._source
        rows = spec.num_heads * (spec.nope_dim + spec.v_dim)
        whole = source.matrix(Part(self._at + self._names.latent.kv_up, rows), spec.kv_rank)
        heads = whole.view(spec.num_heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
        count = spec.num_heads // self._shard.size
        heads = heads[self._shard.rank * count : (self._shard.rank + 1) * count]
        absorb = [source.pack(head[: spec.nope_dim].t().contiguous()) for head in heads]
        expand = [source.pack(head[spec.nope_dim :].contiguous()) for head in heads]
        return source.heads(absorb), source.heads(expand)


def _head_order(spec: LatentSpec, num_heads: int, first: int) -> Tensor | None:
    """Returns the rows that put the pairs of an interleaved RoPE side by side; the values that
    rotate follow the first `first` of each head."""
    if spec.rope is None or not spec.rope.is_interleaved:
        return None
    return head_rows(num_heads, first, spec.rope_dim, first + spec.rope_dim)
