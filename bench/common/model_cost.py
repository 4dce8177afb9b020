"""The least that a model's steps must do.

A step reads every weight and the K/V of its decode rows once, and of a mixture the experts that its
rows draw; it reads and writes the states of its sequences. It multiplies every row by every weight,
and by those of its own experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.common.ceilings import Ceiling
from bench.common.mixtures import MixtureSize
from memory.states.layout import StateLayout
from serve.config import EngineConfig
from serve.engine.step_trace import TracedStep
from serve.loading.footprint import WeightBytes, weight_bytes
from serve.loading.precision import Precision, resolve_precision
from serve.models import ModelSpec, count_parameters
from serve.models.families.layer_spec import LatentSpec
from serve.models.open_checkpoint import open_checkpoint
from serve.scheduler.step_time import StepWork

Drawn = Sequence[int]
"""The number of different experts that the rows of a step drew, for each mixture."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least that must be read and multiplied. products counts operations on weights, in int8 if
    is_int8; attention counts operations in bf16."""

    read_bytes: float
    products: float
    attention: float
    is_int8: bool

    def bound_s(self, ceiling: Ceiling) -> float:
        """Returns the least seconds; a ceiling of 0 is unknown and bounds nothing."""
        rate = ceiling.i8 if self.is_int8 else ceiling.bf16
        compute = self.products / rate if rate else 0.0
        compute += self.attention / ceiling.bf16 if ceiling.bf16 else 0.0
        read = self.read_bytes / ceiling.read if ceiling.read else 0.0
        return max(read, compute)


class AttentionCost(NamedTuple):
    """One layer's attention. decode, prefill: the least operations of a row and a key. kv_bytes:
    those of a token's K/V, which a layer that shares it reads, too. most: the keys that a row sees
    at most."""

    decode: int
    prefill: int
    kv_bytes: float
    most: int | None

    def pairs(self, rows: int, pairs: int) -> int:
        """Returns how many of the pairs of rows and tokens are seen, if rows are alike."""
        return pairs if self.most is None else min(pairs, rows * self.most)


def mixture_sizes(spec: ModelSpec) -> list[MixtureSize]:
    """Returns the mixtures of a model in the order of its layers."""
    return [
        MixtureSize(
            mlp.num_experts,
            mlp.router.top_k,
            mlp.expert.num_weights(mlp.latent_size or spec.hidden_size),
        )
        for mlp in spec.mixtures
    ]


def attention_costs(spec: ModelSpec, kv_bytes: float) -> list[AttentionCost]:
    """Returns each layer's attention; kv_bytes: those of a token in all layers."""
    layers = spec.attention_layers
    widths = [
        layer.num_kv_heads * layer.head_dim * (2 if layer.value_dim is None else 1)
        for layer in layers
    ]
    stored = sum(w for w, layer in zip(widths, layers, strict=True) if layer.shares is None)
    described_layers = [each for each in spec.layers if each.attention is not None]
    if spec.draft_head is not None:
        described_layers.append(spec.draft_head.layer)
    costs = []
    for layer, width, described in zip(layers, widths, described_layers, strict=True):
        value_dim = layer.head_dim if layer.value_dim is None else layer.value_dim
        decode = prefill = 2 * layer.num_heads * (layer.head_dim + value_dim)
        attention = described.attention
        if isinstance(attention, LatentSpec):  # other software expands the latent in prefill
            head_dim = attention.nope_dim + attention.rope_dim
            prefill = min(prefill, 2 * layer.num_heads * (head_dim + attention.v_dim))
        most = min((n for n in (layer.window, layer.chunk) if n is not None), default=None)
        costs.append(AttentionCost(decode, prefill, kv_bytes * width / stored, most))
    return costs


def state_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of a sequence's state in all layers that have one."""
    return StateLayout(spec.state_layers, 1).record_bytes if spec.state_layers else 0


class ModelCost:
    """Sizes of a model's products and of its K/V, as an engine computes them.

    block_weights and head_weights are numbers of weights, weights the bytes of all, with scales;
    kv_bytes: those of one token's K/V.
    """

    def __init__(
        self, spec: ModelSpec, precision: Precision, weights: WeightBytes, kv_bytes: float
    ) -> None:
        counts = count_parameters(spec)
        self.block_weights = counts.blocks
        self.head_weights = counts.head
        self.mixtures = mixture_sizes(spec)
        self.is_int8 = precision.is_int8
        self._read_bytes = weights.blocks + weights.head
        self._expert_weight_bytes = weights.experts / counts.experts if counts.experts else 0.0
        self._routed_weights = sum(each.top_k * each.parameters for each in self.mixtures)
        self._attention = attention_costs(spec, kv_bytes)
        self._state_bytes = state_bytes(spec)

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, kv_bytes: int) -> ModelCost:
        precision, checkpoint = resolve_precision(config, spec), None
        if spec.packed is not None and config.load_format != "random":
            checkpoint = open_checkpoint(config.model_path, spec)
        weights = weight_bytes(config, spec, precision, checkpoint)
        return cls(spec, precision, weights, kv_bytes)

    def expert_bytes(self, rows: int, drawn: Drawn | None = None) -> float:
        """Returns the bytes of the experts that a step of so many rows reads; without `drawn`, of
        those that rows draw if they draw evenly."""
        counts = [each.drawn(rows) for each in self.mixtures] if drawn is None else drawn
        sizes = zip(counts, self.mixtures, strict=True)
        return self._expert_weight_bytes * sum(count * each.parameters for count, each in sizes)

    def step(self, work: StepWork, drawn: Drawn | None = None) -> Work:
        """Returns the work of a traced step, in which every decode row and every chunk samples one
        token at most."""
        num_sampled = work.num_decodes + work.num_chunks if work.samples else 0
        row_weights = self.block_weights + self._routed_weights
        read = self._read_bytes + self.expert_bytes(work.num_rows, drawn)
        # states are read, and written
        read += 2 * (work.num_decodes + work.num_chunks) * self._state_bytes
        attention = 0.0
        for layer in self._attention:
            context = layer.pairs(work.num_decodes, work.num_context)
            read += context * layer.kv_bytes
            decode = layer.pairs(work.num_decodes, work.num_context + work.num_decodes)
            prefill = layer.pairs(work.num_rows - work.num_decodes, work.num_pairs)
            attention += decode * layer.decode + prefill * layer.prefill
        products = 2.0 * (row_weights * work.num_rows + self.head_weights * num_sampled)
        return Work(read, products, attention, self.is_int8)

    def bound_s(
        self,
        steps: Iterable[TracedStep],
        ceiling: Ceiling,
        drawn: Sequence[Drawn] | None = None,
    ) -> float:
        """Returns the least seconds of all steps, one after the other. drawn: those of each step,
        None if they are not known."""
        steps = list(steps)
        each = [None] * len(steps) if drawn is None else drawn
        pairs = zip(steps, each, strict=True)
        return sum(self.step(step.work, some).bound_s(ceiling) for step, some in pairs)
