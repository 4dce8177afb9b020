"""The parts of a decoder block with their weights, and how each computes.

Rows are packed along dim 0; only attention knows sequences. Every product is a LinearOp, which
determines the precision; this file names none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from memory.attention.seam import Attention, Finished, Pending, Rotation
from ops.backend import Backend, ExpertsOp, LinearOp, Norm, Router, Routing
from ops.linear import apply_norm
from ops.sharded import Columns
from serve.models.families.layer_spec import AttentionSpec, QKNorm, QueryScaling


@dataclass(slots=True)
class RowInputs:
    """What blocks need of a step besides the hidden state.

    rotations: cos and sin for each RopeSpec of the model. positions: [T] int64. per_layer: the
    embeddings that blocks add, [layers, T, size], where the model has them.
    """

    rotations: list[Rotation]
    positions: Tensor
    per_layer: Tensor | None = None


@dataclass(slots=True)
class AttentionWeights:
    """The weights of attention with stored keys and values.

    qkv computes q, k and v side by side, or only k and v if q has a product of its own, which runs
    first, so that memory nodes can start; None where a layer reads another layer's K/V. gate
    computes the logits of the output's gates. q_columns, k_columns: all heads' columns, where a
    norm over them is divided among ranks.
    """

    spec: AttentionSpec
    backend: Backend
    norm_eps: float
    q: LinearOp | None
    qkv: LinearOp | None
    o: LinearOp
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    gate: LinearOp | None = None
    rotation: int | None = None  # its number in RowInputs.rotations
    sinks: tuple[float, ...] | None = None
    q_columns: Columns | None = None
    k_columns: Columns | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        """Passes q to attention before k and v are computed."""
        spec, rows = self.spec, x.shape[0]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        num_kv = kv_heads if spec.is_v_k else 2 * kv_heads
        rotation = None if self.rotation is None else inputs.rotations[self.rotation]
        q, qkv = self.queries(x, inputs)
        ticket = attention.begin(index, q)
        k_at = heads
        if self.q is not None and self.qkv is not None:
            qkv, k_at = self.qkv(x).view(rows, num_kv, dim), 0
        if qkv is None:
            return attention.finish(ticket, None, None, None)
        k = qkv[:, k_at : k_at + kv_heads]
        v = k if spec.is_v_k else qkv[:, k_at + kv_heads :]
        if self.v_norm is not None:
            v = self.backend.rms_norm(v, self.v_norm, self.norm_eps)
        elif spec.is_v_k:
            v = v.clone()  # k may be overwritten
        k, rotation = self._rotated(k, self.k_norm, rotation, is_query=False)
        return attention.finish(ticket, k, v, rotation)

    def queries(self, x: Tensor, inputs: RowInputs) -> tuple[Tensor, Tensor | None]:
        """Returns the rotated queries, and what their product gives beside them, if it does: q, k
        and v, [T, H + .., D], of which k and v are as computed."""
        spec, qkv = self.spec, None
        heads, dim = spec.num_heads, spec.head_dim
        rotation = None if self.rotation is None else inputs.rotations[self.rotation]
        if self.q is None:
            assert self.qkv is not None
            found = self.qkv(x)
            qkv = found.view(len(x), found.shape[1] // dim, dim)
            q = qkv[:, :heads]
        else:
            q = self.q(x).view(len(x), heads, dim)
        q, _ = self._rotated(q, self.q_norm, rotation, is_query=True)
        if spec.query_scaling is not None:
            q = q * query_factors(spec.query_scaling, inputs.positions)[:, None, None].to(q.dtype)
        return q, qkv

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the output's product for attended: [T, H, D] of the block's input x."""
        if self.gate is not None:
            gates = row_sigmoid(self.gate(x)).reshape(len(x), attended.shape[1], -1)
            attended = attended * gates.to(attended.dtype)
        return self.o(attended.flatten(1), residual=residual)

    def _rotated(
        self, x: Tensor, weight: Tensor | None, rotation: Rotation | None, *, is_query: bool
    ) -> tuple[Tensor, Rotation | None]:
        """Returns q or k: [T, H, D], normalized and rotated; attention rotates k if it can."""
        norm, columns = self.spec.qk_norm, self.q_columns if is_query else self.k_columns
        is_rotated_here = is_query or (norm is not None and norm.follows_rope)
        if norm is not None and not norm.follows_rope:
            x = self._normed(x, norm, weight, columns)
        if rotation is not None and is_rotated_here:
            x, rotation = self.backend.rotary(x, *rotation), None
        if norm is not None and norm.follows_rope:
            x = self._normed(x, norm, weight, columns)
        return x, rotation

    def _normed(
        self, x: Tensor, norm: QKNorm, weight: Tensor | None, columns: Columns | None
    ) -> Tensor:
        """Normalizes x: [T, H, D], which may have strided rows. columns: those of all heads, of
        which x has one rank's."""
        assert weight is not None, "norms without weights have ones"
        rows, heads, dim = x.shape
        if norm.kind == "rms" and norm.scope == "head":
            return self.backend.rms_norm(x, weight, self.norm_eps)
        if norm.scope == "all":
            flat = x.reshape(rows, heads * dim)
            if columns is not None:
                flat = columns.gather(flat)
            if norm.kind == "rms":
                flat = self.backend.rms_norm(flat, weight, self.norm_eps)
            else:
                flat = self.backend.layer_norm(flat, weight, None, self.norm_eps)
            if columns is not None:
                flat = flat[:, columns.own].contiguous()
            return flat.view(rows, heads, dim)
        ones = weight.new_ones(dim)
        if norm.kind == "rms":
            return self.backend.rms_norm(x, ones, self.norm_eps) * weight
        flat = self.backend.layer_norm(x.reshape(-1, dim), ones, None, self.norm_eps)
        return flat.view(rows, heads, dim) * weight


def query_factors(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Returns the factors of the queries at positions: [T], [T] fp32."""
    steps = ((positions + scaling.offset) // scaling.length).float()
    return 1 + scaling.beta * torch.log1p(steps)


def row_sigmoid(x: Tensor) -> Tensor:
    """Returns the sigmoid of x: [T, N]. A row's bits depend neither on other rows nor on how
    columns are divided among ranks: torch computes the last values of a tensor, fewer than 32, in
    another way."""
    missing = -x.shape[1] % 32
    return functional.pad(x, (0, missing)).sigmoid()[:, : x.shape[1]] if missing else x.sigmoid()


class Mlp(Protocol):
    """The second half of a block."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the half's result (+ residual): [T, hidden] for x: [T, hidden]. The residual may
        be x, and may be overwritten."""


@dataclass(slots=True)
class DenseMlp:
    """An MLP: up includes its norm and the activation."""

    up: LinearOp
    down: LinearOp

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self.up(x), residual=residual)


@dataclass(slots=True)
class MixtureMlp:
    """A mixture of experts behind one norm, with an MLP that all rows share.

    router_norm: the norm of the router's input; None: it reads what the experts read. shared_gate:
    the router with one expert whose weight, a sigmoid, multiplies the shared MLP's result.
    latent_in, latent_out: products before and behind the experts; None: there are none. begin:
    called with the experts' rows before the shared MLP computes, where they are computed elsewhere.
    """

    backend: Backend
    norm: Norm | None
    router: Router
    experts: ExpertsOp
    shared: DenseMlp | None = None
    shared_gate: Router | None = None
    router_norm: Norm | None = None
    latent_in: LinearOp | None = None
    latent_out: LinearOp | None = None
    begin: Callable[[Tensor, Routing], None] | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x if self.norm is None else apply_norm(self.backend, x, self.norm)
        read = rows if self.router_norm is None else apply_norm(self.backend, x, self.router_norm)
        routing = self.backend.route(read, self.router)
        if self.begin is not None:
            self.begin(rows, routing)
        if residual is rows and self.shared is not None:
            residual = residual.clone()  # the shared MLP may overwrite what the experts read
        if self.shared is not None:
            if self.shared_gate is None:
                residual = self.shared(rows, residual)
            else:
                shared = self.shared(rows)
                shared = shared * self.backend.route(rows, self.shared_gate).weights.to(
                    shared.dtype
                )
                residual = shared if residual is None else residual + shared
        if self.latent_in is None or self.latent_out is None:
            return self.experts(rows, routing, residual)
        return self.latent_out(self.experts(self.latent_in(rows), routing), residual=residual)


@dataclass(slots=True)
class SideBySideMlp:
    """An MLP and a mixture that read the same input, each with norms of its own (Gemma 4)."""

    backend: Backend
    dense: DenseMlp
    dense_out: Norm
    mixture: MixtureMlp
    mixture_out: Norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        first = apply_norm(self.backend, self.dense(x), self.dense_out)
        out = first + apply_norm(self.backend, self.mixture(x), self.mixture_out)
        return out if residual is None else residual + out


@dataclass(slots=True)
class PerLayerInput:
    """What a block adds after its MLP from an embedding of its own (Gemma 4)."""

    gate: LinearOp
    project: LinearOp
    norm: Norm


class AttentionHalf(Protocol):
    """The first half of a block. sinks: as in AttentionLayer."""

    sinks: tuple[float, ...] | None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        """Starts the attention of layer `index` for the block's input x: [T, hidden]."""

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the output's product (+ residual) for what `attend` gave, [T, H, D]."""


class NoAttention:
    """The first half of a block that is an MLP alone (Nemotron-H)."""

    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        return Finished(x)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is not None, "nothing is normed after this half"
        return residual


class NoMlp:
    """The second half of a block that has none (Nemotron-H)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is not None, "nothing is normed after this half"
        return residual


@dataclass(slots=True)
class Block:
    """The weights of one block. Norms before a half are part of its products.

    attn_out, mlp_out: norms of a half's result before the sum; attn_sum, mlp_sum: after it.
    """

    attention: AttentionHalf
    mlp: Mlp
    attn_out: Norm | None = None
    mlp_out: Norm | None = None
    attn_sum: Norm | None = None
    mlp_sum: Norm | None = None
    is_parallel: bool = False
    per_layer: PerLayerInput | None = None
    scalar: Tensor | None = None
    is_plain: bool = True

    def finish(
        self,
        backend: Backend,
        attended: Tensor,
        x: Tensor,
        inputs: RowInputs,
        index: int,
        foretell: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Computes the part of the block after attention. attended: [T, H, D]; x: its input.
        foretell: takes the index and the MLP's input, which is near to what the block returns."""
        if self.is_plain:
            x = self.attention.output(attended, x, x)
            if foretell is not None:
                foretell(index, x)
            return self.mlp(x, x)
        if self.is_parallel:
            if foretell is not None:
                foretell(index, x)
            added = self.mlp(x)
            return self.attention.output(attended, x, x) + added
        if self.attn_out is None:
            x = self.attention.output(attended, x, x)
        else:
            x = x + apply_norm(backend, self.attention.output(attended, x, None), self.attn_out)
        if self.attn_sum is not None:
            x = apply_norm(backend, x, self.attn_sum)
        if foretell is not None:
            foretell(index, x)
        if self.mlp_out is None:
            x = self.mlp(x, x)
        else:
            x = x + apply_norm(backend, self.mlp(x), self.mlp_out)
        if self.mlp_sum is not None:
            x = apply_norm(backend, x, self.mlp_sum)
        if self.per_layer is not None:
            assert inputs.per_layer is not None
            added = self.per_layer.gate(x) * inputs.per_layer[index].to(x.dtype)
            x = x + apply_norm(backend, self.per_layer.project(added), self.per_layer.norm)
        return x if self.scalar is None else x * self.scalar
