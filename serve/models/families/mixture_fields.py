"""Readers of the keys and the ways of storing that mixtures of experts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import MAX_WIDTH, num_layers_of, read_activation
from serve.models.families.layer_spec import MixtureSpec, MlpSpec
from serve.models.families.names import ExpertNames, Fields, WeightNames

MAX_EXPERTS = 4096
PER_EXPERT = ExpertNames()
FUSED = ExpertNames(
    up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    is_fused=True,
    bias="{}_bias",
)


def one_by_one(fused: ExpertNames, at: str) -> ExpertNames:
    """Returns the names of a family's experts if a quantizer stores them one by one below `at`,
    and not fused."""
    return replace(
        fused,
        up=(f"{at}.{{}}.gate_proj", f"{at}.{{}}.up_proj"),
        down=f"{at}.{{}}.down_proj",
        is_fused=False,
        is_transposed=False,
        is_interleaved=False,
    )


def mixture_names(**changes: object) -> WeightNames:
    """Returns names of a mixture that is stored expert by expert or with all experts fused."""
    ways = (PER_EXPERT, FUSED)
    return WeightNames(experts=tuple(replace(way, **changes) for way in ways))  # type: ignore[arg-type]


def read_expert(config: ConfigReader, key: str = "moe_intermediate_size") -> MlpSpec:
    """Returns the MLP of one expert."""
    return MlpSpec(
        size=config.integer(key, high=MAX_WIDTH * 8),
        activation=read_activation(config, "hidden_act", "silu"),
    )


def read_counts(
    config: ConfigReader, experts: Sequence[str], top_k: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Returns the numbers of experts, under the first of the keys, and of those a row uses."""
    key = next((key for key in experts if config.has(key)), experts[0])
    num_experts = config.integer(key, high=MAX_EXPERTS)
    chosen = config.integer(top_k)
    if chosen > num_experts:
        raise config.fail(top_k, f"is {chosen}, but {key} is {num_experts}")
    return num_experts, chosen


def with_mixture(fields: Fields, mixture: MixtureSpec, is_sparse: Sequence[bool]) -> Fields:
    """Replaces the MLP of those layers for which is_sparse holds."""
    layers = tuple(
        replace(layer, mlp=mixture) if sparse else layer
        for layer, sparse in zip(fields["layers"], is_sparse, strict=True)
    )
    return fields | {"layers": layers}


def read_sigmoid_mixture(
    config: ConfigReader,
    *,
    num_shared: int = 0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> MixtureSpec:
    """Reads a mixture as DeepSeek-V3 has it: sigmoid scores with a correction, groups, shared
    experts side by side as one MLP. The arguments are the family's defaults."""
    num_experts, top_k = read_counts(config, ("n_routed_experts", "num_local_experts"))
    expert = read_expert(config)
    num_shared = config.integer("n_shared_experts", num_shared, low=0, high=MAX_EXPERTS)
    groups = config.integer("n_group", groups)
    if num_experts % groups or (num_experts // groups < 2 and groups > 1):
        raise config.fail("n_group", f"is {groups}; it does not divide {num_experts} experts")
    return MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(
            top_k=top_k,
            score="sigmoid",
            is_normalized=config.boolean("norm_topk_prob", True),
            sum_eps=1e-20,
            scale=config.number("routed_scaling_factor", scale),
            num_groups=groups,
            num_top_groups=min(groups, config.integer("topk_group", top_groups)),
            group_best=2,
        ),
        has_correction=True,
        shared=replace(expert, size=num_shared * expert.size) if num_shared else None,
    )


def read_mlp_types(config: ConfigReader, default: Sequence[bool]) -> list[bool]:
    """Returns whether each layer is a mixture: `mlp_layer_types`, or the default."""
    key = "mlp_layer_types"
    kinds = config.values.get(key)
    if kinds is None:
        return list(default)
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default)
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise config.fail(key, f"must list dense or sparse for {len(default)} layers")
    return [kind == "sparse" for kind in kinds]


def after_first_dense(config: ConfigReader, default: int) -> list[bool]:
    """Returns whether each layer is a mixture: all from first_k_dense_replace on."""
    first = config.integer("first_k_dense_replace", default, low=0)
    return [index >= first for index in range(num_layers_of(config))]
