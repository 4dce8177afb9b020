"""Divides a model's layers among the stages of a pipeline so that their times are even."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from serve.errors import ConfigError
from serve.models import ModelSpec
from serve.models.families.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec
from serve.models.spec import attention_layer
from serve.scheduler.stage_cut import cut_stages

_PROMPT_TOKENS = 16_384  # a prompt for which one takes a pipeline


def layer_stages(
    spec: ModelSpec,
    num_stages: int,
    starts: Sequence[int] | None = None,
    max_len: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Returns the first layer of each stage and their number.

    A layer's time is predicted by the operations of a row of a long prompt: on the weights that it
    uses, and on the keys that it sees, where layers with a window or chunks see fewer. max_len: the
    longest context that is served; None: the model's. The head does not count: prompts, for whose
    sake one takes a pipeline, do not use it. Layers that share K/V stay together. starts: where a
    stage of a converted model can begin, by the number of an attention. ConfigError if there are
    too few layers.
    """
    if starts is None:
        blocks = _inseparable(spec)
    else:
        blocks = [range(*each) for each in pairwise([*starts, spec.num_layers])]
    if num_stages > len(blocks):
        raise ConfigError(
            f"pipeline_parallel_size {num_stages} is more than the model can be divided into:"
            f" {_described(len(blocks), spec.num_layers, is_converted=starts is not None)}"
        )
    num_keys = min(max_len or spec.max_model_len, spec.max_model_len, _PROMPT_TOKENS) // 2
    seconds = [
        float(sum(_operations(spec, spec.layers[i], num_keys) for i in block)) for block in blocks
    ]
    cut = cut_stages(seconds, num_stages)
    starts = [blocks[first].start for first, _ in cut] + [spec.num_layers]
    return tuple((start, end - start) for start, end in pairwise(starts))


def _inseparable(spec: ModelSpec) -> list[range]:
    """Returns runs of layers between which the model can be cut."""
    last_reader = {}
    for number, layer in enumerate(spec.layers):
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.shares is not None:
            last_reader[attention.shares] = number
    runs, start, reach = [], 0, 0
    for number in range(spec.num_layers):
        reach = max(reach, last_reader.get(number, number))
        if reach == number:
            runs.append(range(start, number + 1))
            start = reach = number + 1
    return runs


def _described(num_blocks: int, num_layers: int, *, is_converted: bool) -> str:
    if is_converted:
        return f"it has {num_blocks} parts between attentions"
    if num_blocks < num_layers:
        return f"its {num_layers} layers form {num_blocks} groups that share K/V"
    return f"it has {num_layers} layers"


def _operations(spec: ModelSpec, layer: LayerSpec, num_keys: int) -> int:
    """Returns the multiplications of a row in a layer: one for each weight that it uses, and those
    of its attention to num_keys tokens before it, of which it may see fewer."""
    seen = attention_layer(layer)
    keys = min(n for n in (num_keys, seen.window, seen.chunk) if n is not None)
    value_dim = seen.head_dim if seen.value_dim is None else seen.value_dim
    return _weights(spec, layer) + keys * seen.num_heads * (seen.head_dim + value_dim)


def _weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """Returns the weights of a layer that one row uses."""
    hidden, attention, mlp = spec.hidden_size, layer.attention, layer.mlp
    assert attention is not None and mlp is not None, "models with states have one rank"
    if isinstance(attention, LatentSpec):
        inner = attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)
        total = hidden * (attention.kv_rank + attention.num_heads * attention.v_dim)
        total += (attention.q_rank or hidden) * inner
    else:
        total = 2 * hidden * (attention.q_size + attention.kv_size)
    if isinstance(mlp, MlpSpec):
        return total + mlp.num_weights(hidden)
    used = [mlp.expert] * mlp.router.top_k
    used += [each for each in (mlp.shared, mlp.dense) if each is not None]
    return total + sum(each.num_weights(hidden) for each in used)
