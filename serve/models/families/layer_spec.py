"""LayerSpec: the switches of one block, which families read from config.json.

Blocks of a model may differ in everything here. Multipliers of a model that can be folded into
weights are no fields: the loader folds them into products (ModelSpec names them).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ops.backend import RouterKind
from serve.models.families.rope_spec import RopeSpec
from serve.models.families.state_spec import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """The normalization of queries and keys.

    kind: "rms" or "layer". scope: what is normalized together and has its own weights: "head" (one
    weight of [D] for all heads), "each" (a weight for each head, [H, D]) or "all" (all heads
    together, [H * D]). follows_rope: it comes after the rotation.
    """

    kind: str = "rms"
    scope: str = "head"
    has_weight: bool = True
    follows_rope: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """A factor of the queries that grows with the position p:
    1 + beta * ln(1 + floor((p + offset) / length)) (Llama 4, Ministral 3)."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with stored keys and values.

    rope: None for a layer without positions. window: the keys a row sees, itself included. chunk: a
    row sees the keys of its own chunk of so many positions. has_gate: the sigmoid of another
    product of the input multiplies each value of the output. shares: the earlier layer whose K/V is
    read; such a layer has no k and v. soft_cap: scores become cap * tanh(score / cap). has_v_norm:
    values are normalized per head without a weight. is_v_k: v is k before its norm, and has no
    product. is_gate_in_q: the gate's product is stored in q's, behind each head's rows. out_scale
    multiplies the result.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    rope: RopeSpec | None = None
    qk_norm: QKNorm | None = None
    query_scaling: QueryScaling | None = None
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_gate: bool = False
    soft_cap: float = 0.0
    has_sinks: bool = False
    shares: int | None = None
    has_v_norm: bool = False
    is_v_k: bool = False
    is_gate_in_q: bool = False
    out_scale: float = 1.0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    K/V is one latent of kv_rank values and a rotated key of rope_dim values that all heads share.
    Queries and keys of a head have nope_dim + rope_dim values, values have v_dim. q_rank: the rank
    of the query's product; None: it has full rank. rope: None where no value is rotated.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm_eps: float
    rope: RopeSpec | None
    has_bias: bool = False
    query_scaling: QueryScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """An MLP. activation: a kind of Backend.activation, or "xielu", which has learned numbers.
    up_scale and out_scale multiply the first product and the last one."""

    size: int
    activation: str = "silu"
    is_gated: bool = True
    has_bias: bool = False
    up_scale: float = 1.0
    out_scale: float = 1.0

    def num_weights(self, hidden: int) -> int:
        """Returns the weights of its products, without biases."""
        return (3 if self.is_gated else 2) * hidden * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """A mixture of experts.

    expert: the MLP of one expert. router: how experts are chosen. has_correction: the router adds a
    learned number to each score for the choice. shared: an MLP that all rows use beside their
    experts; is_shared_gated: sigmoid of a product of the input multiplies its result. scales_input:
    weights multiply the experts' inputs (Llama 4). is_router_normed: the router has a norm and
    scales of its own (Gemma 4). dense: an MLP beside the mixture with norms of its own (Gemma 4).
    latent_size: the size of what experts read and give, between two products that all rows use
    (Nemotron 3); 0: the hidden size.
    """

    num_experts: int
    expert: MlpSpec
    router: RouterKind
    has_router_bias: bool = False
    has_correction: bool = False
    shared: MlpSpec | None = None
    is_shared_gated: bool = False
    scales_input: bool = False
    is_router_normed: bool = False
    dense: MlpSpec | None = None
    latent_size: int = 0


PRE_NORM = frozenset({"attn_in", "mlp_in"})
"""The places of norms of a Llama block."""
AFTER_NORM = frozenset({"attn_out", "mlp_out"})
"""Norms after each half of a block, before the sum (OLMo 2)."""
SANDWICH_NORM = PRE_NORM | AFTER_NORM
"""Norms before and after each half (Gemma 3)."""
POST_NORM = frozenset({"attn_sum", "mlp_sum"})
"""Norms after each sum (OPT 350m)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block.

    norms: places out of attn_in, attn_out, attn_sum and the same of mlp. is_parallel: attention and
    MLP read the same input; without "mlp_in" they share one norm. per_layer_input: the size of an
    embedding that each block adds after its MLP (Gemma 4); 0: none. has_scalar: a learned number
    multiplies the block's result. state: a layer with a state, in place of attention or, where the
    block has both, beside it.
    """

    attention: AttentionSpec | LatentSpec | None
    mlp: MlpSpec | MixtureSpec | None
    state: StateSpec | None = None
    norms: frozenset[str] = field(default=PRE_NORM)
    is_parallel: bool = False
    per_layer_input: int = 0
    has_scalar: bool = False
