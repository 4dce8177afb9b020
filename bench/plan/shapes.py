"""The sizes of models: the numbers that steps read, multiply and store.

A model is a checkpoint's config.json, or a name of models.toml, whose dimensions come from the
published config.json files; rows with a model_type have the keys of config.json, and are read as
the server reads them.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.common.mixtures import MixtureSize
from bench.plan.layers import LayerAttention
from serve.errors import ConfigError

if TYPE_CHECKING:
    from serve.models.families.layer_spec import MixtureSpec, MlpSpec

WEIGHTS = ("float32", "bfloat16", "int8", "fp8", "int4", "nf4")
KV = ("float32", "bfloat16", "int8", "int4")
_QUANTIZED = ("int8", "int4", "nf4", "fp8")
_WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "fp8": 8.0}
_GROUP_SCALE_BITS = 16
_PLAIN = ("float32", "bfloat16")
# The types in which products multiply, best first; a device that lacks a type takes the next.
_FACTORS = {
    "float32": ("fp32",),
    "bfloat16": ("bf16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "int4": ("int8", "bf16", "fp32"),
    "nf4": ("int8", "bf16", "fp32"),
    "fp8": ("fp8",),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of weights and K/V. 4-bit weights have a scale per weight_group inputs and are
    multiplied with int8 rows; the last product and its weights are then int8."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"
    weight_group: int = 64
    kv_group: int = 64

    @property
    def weight_bits(self) -> float:
        """Bits of a weight in a layer, including its part of the scales."""
        if self.weights in ("int4", "nf4"):
            return 4 + _GROUP_SCALE_BITS / self.weight_group
        return _WEIGHT_BITS[self.weights]

    @property
    def head_bits(self) -> float:
        """Bits of a weight of the last product."""
        return 8.0 if self.weights in _QUANTIZED else self.weight_bits

    @property
    def is_quantized(self) -> bool:
        return self.weights in _QUANTIZED

    @property
    def factors(self) -> tuple[str, ...]:
        """The types in which products may multiply, best first."""
        return _FACTORS[self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model.

    block_parameters are in the products of all layers, head_parameters in the last product, and
    other_parameters in norms, biases and positions. mixtures are those of the layers that have one;
    block_parameters leaves their experts out. embedding_parameters are only looked up; they
    are shared with the last product if is_tied. q_width and kv_width are the numbers in a row's q
    and in its k. windows has one entry per layer with K/V, None if the layer attends to all tokens;
    num_other_layers have none. state_bytes: those of a sequence in all layers that have a state.
    """

    name: str
    hidden: int
    q_width: int
    kv_width: int
    head_dim: int
    ffn: int
    windows: tuple[int | None, ...]
    max_model_len: int
    block_parameters: int
    head_parameters: int = 0
    embedding_parameters: int = 0
    other_parameters: int = 0
    is_tied: bool = False
    mixtures: tuple[MixtureSize, ...] = ()
    attentions: tuple[LayerAttention, ...] = ()
    num_other_layers: int = 0
    state_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.windows) + self.num_other_layers

    @property
    def layer_outputs(self) -> int:
        """The outputs of the products of a layer, if it has attention and a gated MLP, without
        those of experts."""
        ffn = 0 if self.mixtures else 2 * self.ffn
        return self.q_width + 2 * self.kv_width + 2 * self.hidden + ffn

    @property
    def num_heads(self) -> int:
        return self.q_width // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.kv_width // self.head_dim

    def require_divisible(self, num_devices: int) -> None:
        """Raises ConfigError if the heads cannot be divided between tensor-parallel devices. If the
        devices are a multiple of the K/V heads, each K/V head is on several devices."""
        if num_devices > 1:
            self.require_no_states("several devices")
        heads, kv = self.num_heads, self.num_kv_heads
        if heads % num_devices or (kv % num_devices and num_devices % kv):
            raise ConfigError(
                f"{heads} heads, {kv} of K/V, are not divisible between {num_devices} devices"
            )

    def require_no_states(self, where: str) -> None:
        """Raises ConfigError if layers have states, which are served on one device alone."""
        if self.state_bytes:
            raise ConfigError(f"{self.name} has layers with states, which {where} cannot divide")

    @property
    def expert_parameters(self) -> int:
        return sum(each.num_experts * each.parameters for each in self.mixtures)

    @property
    def routed_parameters(self) -> int:
        """The parameters in the experts of one row."""
        return sum(each.top_k * each.parameters for each in self.mixtures)

    @property
    def num_parameters(self) -> int:
        """The published number of parameters, in which shared parameters count once."""
        own = 0 if self.is_tied else self.embedding_parameters
        products = self.block_parameters + self.expert_parameters + self.head_parameters
        return products + self.other_parameters + own

    @property
    def active_parameters(self) -> int:
        """The parameters without the experts that a row does not use."""
        return self.num_parameters - self.expert_parameters + self.routed_parameters

    def layer_attentions(self) -> Counter[LayerAttention]:
        """Returns how many layers attend in each way."""
        if self.attentions:
            return Counter(self.attentions)
        each = 4 * self.q_width
        return Counter(
            LayerAttention(window, self.num_kv_heads, self.head_dim, each, each)
            for window in self.windows
        )

    @property
    def has_int8_kv(self) -> bool:
        """Whether K/V of all layers can be int8."""
        try:
            self.kv_token_bytes(Precision(kv="int8"))
        except ConfigError:
            return False
        return True

    def kv_by_window(self, precision: Precision) -> dict[int | None, float]:
        """Returns the K/V bytes that a token takes in the layers of each window."""
        found: dict[int | None, float] = {}
        for layer, number in self.layer_attentions().items():
            one = number * layer.stored_bytes(precision.kv, precision.kv_group)
            if one:
                found[layer.window] = found.get(layer.window, 0.0) + one
        return found

    def kv_token_bytes(self, precision: Precision) -> float:
        """Returns the K/V bytes of one token in all layers."""
        return sum(self.kv_by_window(precision).values())

    def expert_bytes(self, precision: Precision, rows: float) -> float:
        """Returns the bytes of the experts that rows draw evenly."""
        drawn = sum(each.drawn(rows) * each.parameters for each in self.mixtures)
        return drawn * precision.weight_bits / 8

    def block_bytes(self, precision: Precision) -> float:
        return self.block_parameters * precision.weight_bits / 8

    def head_bytes(self, precision: Precision) -> float:
        return self.head_parameters * precision.head_bits / 8

    def weight_bytes(self, precision: Precision) -> float:
        """Returns the bytes of all weights in memory. The embedding has 16 bits, or 32 with fp32
        weights; it is a second copy if a tied last product has another type. Norms and biases are
        fp32."""
        is_shared = self.is_tied and precision.weights in _PLAIN
        looked_up = 0 if is_shared else self.embedding_parameters
        table = looked_up * (4 if precision.weights == "float32" else 2)
        return (
            self.block_bytes(precision)
            + self.expert_parameters * precision.weight_bits / 8
            + self.head_bytes(precision)
            + table
            + 4 * self.other_parameters
        )


def make_shape(
    name: str,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    context: int,
    windows: Sequence[int | None],
    is_tied: bool,
    is_gated: bool = True,
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
    has_o_bias: bool = False,
    has_mlp_bias: bool = False,
    norm_parameters: int = 1,
    has_final_norm: bool = True,
    embed: int | None = None,
    num_positions: int = 0,
) -> Shape:
    """Returns a shape. norm_parameters is 1 for norms with a weight, 2 with a bias too."""
    q, kv, layers, embed = heads * head_dim, kv_heads * head_dim, len(windows), embed or hidden
    ups = 2 if is_gated else 1
    products = hidden * (2 * q + 2 * kv) + (ups + 1) * hidden * ffn
    others = 2 * hidden * norm_parameters + (2 * head_dim if has_qk_norm else 0)
    others += has_qkv_bias * (q + 2 * kv) + has_o_bias * hidden
    others += has_mlp_bias * (ups * ffn + hidden)
    projections = 2 * hidden * embed if embed != hidden else 0
    return Shape(
        name=name,
        hidden=hidden,
        q_width=q,
        kv_width=kv,
        head_dim=head_dim,
        ffn=ffn,
        windows=tuple(windows),
        max_model_len=context,
        block_parameters=layers * products + projections,
        head_parameters=vocab * embed,
        embedding_parameters=vocab * embed,
        other_parameters=layers * others
        + has_final_norm * hidden * norm_parameters
        + num_positions * hidden,
        is_tied=is_tied,
    )


def load_shape(model: str) -> Shape:
    """Returns the shape of a name of models.toml in any case, a checkpoint's directory or its
    config.json. Raises ConfigError."""
    families = known_models()
    if model in families:
        return _named(model, families[model])
    path = Path(model)
    if path.exists():
        return _read(path.parent if path.name == "config.json" else path)
    same = next((name for name in families if name.lower() == model.lower()), None)
    if same is not None:
        return _named(same, families[same])
    raise ConfigError(
        f"model {model!r} is neither a directory with a config.json nor one of: "
        f"{', '.join(families)}"
    )


def known_models() -> dict[str, dict[str, Any]]:
    text = files("bench.plan").joinpath("models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _named(name: str, row: dict[str, Any]) -> Shape:
    if "model_type" in row:
        with TemporaryDirectory() as folder:
            # TOML has no null, which some keys need against their defaults
            config = {key: None if value == "null" else value for key, value in row.items()}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            return replace(_read(Path(folder)), name=name)
    sizes = dict(row)
    layers, window = sizes.pop("layers"), sizes.pop("window", None)
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    return make_shape(name, windows=[window] * layers, **sizes)


def _ffn(mlp: MlpSpec | MixtureSpec | None) -> int:
    """Returns the values between the products of an MLP that one row uses."""
    from serve.models.families.layer_spec import MixtureSpec

    if mlp is None:
        return 0
    return mlp.router.top_k * mlp.expert.size if isinstance(mlp, MixtureSpec) else mlp.size


def _read(path: Path) -> Shape:
    # these import torch
    from bench.common.model_cost import attention_costs, mixture_sizes, state_bytes
    from serve.models import count_parameters, read_spec

    spec = read_spec(path)
    counts, layers = count_parameters(spec), spec.attention_layers
    table = spec.vocab_size * spec.embed_size
    mlp = spec.layers[-1].mlp
    costs = attention_costs(spec, 1.0)
    attentions = tuple(
        LayerAttention(
            cost.most,
            layer.num_kv_heads,
            layer.head_dim,
            cost.decode,
            cost.prefill,
            layer.value_dim,
            layer.shares is not None,
        )
        for layer, cost in zip(layers, costs, strict=True)
    )
    q_width = layers[0].num_heads * layers[0].head_dim
    plain = LayerAttention(
        None, layers[0].num_kv_heads, layers[0].head_dim, 4 * q_width, 4 * q_width
    )
    is_uniform = all(each._replace(window=None) == plain for each in attentions)
    return Shape(
        name=path.resolve().name,
        hidden=spec.hidden_size,
        q_width=q_width,
        kv_width=layers[0].num_kv_heads * layers[0].head_dim,
        head_dim=layers[0].head_dim,
        ffn=_ffn(mlp),
        windows=tuple(each.window for each in attentions),
        max_model_len=spec.max_model_len,
        block_parameters=counts.blocks,
        head_parameters=counts.head,
        embedding_parameters=table,
        # a tied table counts as the last product
        other_parameters=counts.others + counts.tables - (0 if spec.is_tied else table),
        is_tied=spec.is_tied,
        mixtures=tuple(mixture_sizes(spec)),
        attentions=() if is_uniform else attentions,
        num_other_layers=spec.num_layers - len(layers),
        state_bytes=state_bytes(spec),
    )
