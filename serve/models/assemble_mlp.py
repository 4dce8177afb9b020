"""Builds the MLPs of blocks, dense and mixtures, from a source of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Backend, Fusion, LinearOp, Norm, Router, RouterKind
from serve.models.families.layer_spec import MixtureSpec, MlpSpec
from serve.models.families.names import ExpertNames, WeightNames
from serve.models.layers.blocks import DenseMlp, MixtureMlp, Mlp, SideBySideMlp
from serve.models.parts import Part
from serve.models.shard import Shard
from serve.models.spec import ModelSpec
from serve.models.tensors import TensorSource
from serve.models.xielu import Xielu


class MlpAssembler:
    """Builds the MLP of one block. norm: builds the norm of a name."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        source: TensorSource,
        backend: Backend,
        norm: Callable[[str], Norm],
        shard: Shard,
    ) -> None:
        self._shard = shard
        self._spec = spec
        self._names = names
        self._source = source
        self._backend = backend
        self._norm = norm

    def mlp(self, mlp: MlpSpec | MixtureSpec, at: str, norm: Norm | None) -> Mlp:
        """Builds the MLP of the block whose tensors' names begin with `at`, behind its norm."""
        names, scale = self._names, self._spec.residual_scale
        if isinstance(mlp, MlpSpec):
            up = tuple(at + name for name in names.up)
            return self._dense(mlp, up, at + names.down, Fusion(norm), scale)
        stored = self._find_experts(mlp, names.experts, at)
        if mlp.dense is None:
            return self._mixture(mlp, stored, at, norm)
        up = tuple(at + name for name in names.up)
        return SideBySideMlp(
            self._backend,
            self._dense(mlp.dense, up, at + names.down, Fusion(norm), scale),
            self._norm(at + stored.dense_out_norm),
            self._mixture(mlp, stored, at, self._norm(at + stored.in_norm)),
            self._norm(at + stored.out_norm),
        )

    def _dense(
        self, mlp: MlpSpec, up: tuple[str, ...], down: str, fusion: Fusion, scale: float
    ) -> DenseMlp:
        hidden, source, shard = self._spec.hidden_size, self._source, self._shard
        is_xielu = mlp.activation == "xielu"
        if not is_xielu:
            fusion = fusion._replace(activation=mlp.activation, is_gated=mlp.is_gated)
        num_parts = 2 if mlp.is_gated else 1
        sizes = [mlp.size] * num_parts if len(up) == num_parts else [num_parts * mlp.size]
        parts = [Part(name, size) for name, size in zip(up, sizes, strict=True)]
        parts = shard.ups(parts, is_gated=mlp.is_gated)
        up_op = source.product(
            parts, hidden, has_bias=mlp.has_bias, fusion=fusion, scale=mlp.up_scale
        )
        if is_xielu:
            up_op = Xielu.after(up_op, down.rpartition(".")[0] + ".act_fn", source)
        down_part = shard.part(Part(down, hidden))
        down_op = source.product(
            [down_part], mlp.size, has_bias=mlp.has_bias, scale=scale * mlp.out_scale
        )
        return DenseMlp(shard.linear(up_op, mlp.size), shard.linear(down_op, hidden))

    # -- mixtures

    def _find_experts(
        self, mixture: MixtureSpec, ways: tuple[ExpertNames, ...], at: str
    ) -> ExpertNames:
        """Returns the way in which the checkpoint stores a mixture; of those with the same names
        the one whose shapes fit."""
        found = [way for way in ways if self._source.has_weight(at + way.up[0].format(0))]
        if len(found) > 1:
            width = self._width(mixture)
            for way in found:
                part = _up_parts(mixture, way, at, 0)[0]
                if self._source.shape(part.weight) == part.shape(width, is_transposed=False):
                    return way
        return (found or ways)[0]

    def _mixture(
        self, mixture: MixtureSpec, names: ExpertNames, at: str, norm: Norm | None
    ) -> MixtureMlp:
        experts = [self._expert(mixture, names, at, index) for index in range(mixture.num_experts)]
        op = self._source.experts(
            [up for up, _ in experts],
            [down for _, down in experts],
            scales_input=mixture.scales_input,
        )
        op = self._shard.experts(op, mixture.expert.size, self._width(mixture))
        built = MixtureMlp(self._backend, norm, self._router(mixture, names, at), op)
        if mixture.is_router_normed:
            # the router's own scales are part of its weight
            ones = self._source.ones(self._spec.hidden_size)
            built.router_norm = Norm("rms", ones, None, self._spec.norm_eps)
        if mixture.shared is not None:
            up = tuple(at + name for name in names.shared_up)
            scale = self._spec.residual_scale
            built.shared = self._dense(mixture.shared, up, at + names.shared_down, NO_FUSION, scale)
            if mixture.is_shared_gated:
                built.shared_gate = self._shared_gate(at + names.shared_gate)
        if mixture.latent_size:
            built.latent_in, built.latent_out = self._latent_products(mixture, names, at)
        return built

    def _width(self, mixture: MixtureSpec) -> int:
        """Returns the size of what experts read and give."""
        return mixture.latent_size or self._spec.hidden_size

    def _latent_products(
        self, mixture: MixtureSpec, names: ExpertNames, at: str
    ) -> tuple[LinearOp, LinearOp]:
        """Returns the products before and behind the experts."""
        size, hidden = mixture.latent_size, self._spec.hidden_size
        into = self._source.product([self._shard.part(Part(at + names.latent_in, size))], hidden)
        back = self._source.product(
            [self._shard.part(Part(at + names.latent_out, hidden))],
            size,
            scale=self._spec.residual_scale,
        )
        return self._shard.linear(into, size), self._shard.linear(back, hidden)

    def _shared_gate(self, name: str) -> Router:
        """Returns the gate of the shared MLP as a router, so that it is as exact as one: rounding
        its one row to 4 bits would change all results of the MLP."""
        weight = self._source.matrix(Part(name, 1), self._spec.hidden_size, stays_plain=True)
        return Router(RouterKind(top_k=1, score="sigmoid"), _router_weight(weight))

    def _expert(
        self, mixture: MixtureSpec, names: ExpertNames, at: str, index: int
    ) -> tuple[LinearOp, LinearOp]:
        """Returns the products up, with the activation, and down of one expert."""
        width, mlp = self._width(mixture), mixture.expert
        fusion = Fusion(None, mlp.activation, mlp.is_gated)
        scale = 1.0 if mixture.latent_size else self._spec.residual_scale
        parts = self._shard.ups(_up_parts(mixture, names, at, index), is_gated=mlp.is_gated)
        up = self._source.product(parts, width, has_bias=mlp.has_bias, fusion=fusion)
        whole = _part(names, at + names.down, width, index, mixture.num_experts)
        down_part = self._shard.part(whole)
        return up, self._source.product([down_part], mlp.size, has_bias=mlp.has_bias, scale=scale)

    def _router(self, mixture: MixtureSpec, names: ExpertNames, at: str) -> Router:
        num, hidden, source = mixture.num_experts, self._spec.hidden_size, self._source
        wide = torch.float32

        def vector(name: str) -> Tensor:
            return source.vector(at + name, (num,), dtype=wide)

        name = f"{at}{names.router}.weight"
        weight = source.table(name, (num, hidden), is_looked_up=False)
        if weight is not None:
            weight = _router_weight(weight)
        expert_scales = None
        if mixture.is_router_normed:
            scale = source.vector(at + names.router_scale, (hidden,), dtype=wide)
            if weight is not None:
                weight = weight.float() * (scale * hidden**-0.5)
            expert_scales = vector(names.expert_scale)
        return Router(
            mixture.router,
            weight,
            vector(f"{names.router}.bias") if mixture.has_router_bias else None,
            self._correction(mixture, names, at),
            expert_scales,
        )

    def _correction(self, mixture: MixtureSpec, names: ExpertNames, at: str) -> Tensor | None:
        if not mixture.has_correction:
            return None
        num = mixture.num_experts
        shape = (1, num) if names.is_correction_row else (num,)
        stored = self._source.vector(at + names.correction, shape, dtype=torch.float32)
        return None if stored is None else stored.view(-1)


def _router_weight(weight: Tensor) -> Tensor:
    """Returns a router's weight in a type that routers take."""
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()


def _part(names: ExpertNames, name: str, num_rows: int, index: int, num_experts: int) -> Part:
    if not names.is_fused:
        return Part(name.format(index), num_rows, expert=index)
    return Part(
        name,
        num_rows,
        expert=index,
        is_fused=True,
        bias=names.bias.format(name),
        num_experts=num_experts,
        is_transposed=names.is_transposed,
    )


def _up_parts(mixture: MixtureSpec, names: ExpertNames, at: str, index: int) -> list[Part]:
    """Returns the parts of one expert's gate and up."""
    size, num_parts = mixture.expert.size, 2 if mixture.expert.is_gated else 1
    if len(names.up) == num_parts:
        return [_part(names, at + name, size, index, mixture.num_experts) for name in names.up]
    whole = _part(names, at + names.up[0], num_parts * size, index, mixture.num_experts)
    if not names.is_interleaved:
        return [whole]
    return [replace(whole, rows=slice(first, None, 2)) for first in (0, 1)]
