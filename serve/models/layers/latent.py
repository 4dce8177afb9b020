"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

K/V is the latent of a token and one rotated key that all heads share. The product that would expand
the latent into the keys of a head is applied to the query instead, and the one for the values to
the attention's result, so attention reads latents only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.attention.seam import Attention, Pending
from ops.backend import Backend, HeadsOp, LinearOp
from serve.models.families.layer_spec import LatentSpec
from serve.models.layers.blocks import RowInputs, query_factors


@dataclass(slots=True)
class LatentAttention:
    """The weights of one layer's attention.

    inputs computes the query of low rank (or the whole query), the latent and the shared key side
    by side; None where q has a product of its own, q_down, that runs before kv_down. q_up: from the
    low rank to all heads. absorb: from a head's part without positions to the latent's size;
    expand: from the latent's size to a head's values. rotation: its number in
    RowInputs.rotations, None where nothing rotates.
    """

    spec: LatentSpec
    backend: Backend
    inputs: LinearOp | None
    q_down: LinearOp | None
    kv_down: LinearOp | None
    q_norm: Tensor | None
    q_up: LinearOp | None
    kv_norm: Tensor
    absorb: HeadsOp
    expand: HeadsOp
    o: LinearOp
    rotation: int | None
    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        """Passes the absorbed queries to attention before the latents are computed."""
        spec, rows = self.spec, x.shape[0]
        q_size = spec.q_rank or spec.num_heads * (spec.nope_dim + spec.rope_dim)
        kv: Tensor | None = None
        if self.inputs is not None:
            both = self.inputs(x)
            q, kv = both[:, :q_size], both[:, q_size:]
        else:
            assert self.q_down is not None
            q = self.q_down(x)
        rotation = None if self.rotation is None else inputs.rotations[self.rotation]
        if self.q_up is not None:
            assert self.q_norm is not None
            q = self.q_up(self.backend.rms_norm(q, self.q_norm, spec.norm_eps))
        q = q.reshape(rows, spec.num_heads, spec.nope_dim + spec.rope_dim)
        turned = q[..., spec.nope_dim :].contiguous()
        if rotation is not None:
            turned = self.backend.rotary(turned, *rotation)
        absorbed = self.absorb(q[..., : spec.nope_dim])
        query = torch.cat((absorbed.to(turned.dtype), turned), dim=2)
        if spec.query_scaling is not None:
            factors = query_factors(spec.query_scaling, inputs.positions)
            query = query * factors[:, None, None].to(query.dtype)
        ticket = attention.begin(index, query)
        if kv is None:
            assert self.kv_down is not None
            kv = self.kv_down(x)
        latent = self.backend.rms_norm(kv[:, : spec.kv_rank], self.kv_norm, spec.norm_eps)
        key = kv[:, None, spec.kv_rank :].contiguous()
        if rotation is not None:
            key = self.backend.rotary(key, *rotation)
        k = torch.cat((latent[:, None], key), dim=2)
        return attention.finish(ticket, k, None, None)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the output's product for attended: [T, H, kv_rank]."""
        return self.o(self.expand(attended).flatten(1), residual=residual)
