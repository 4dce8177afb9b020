"""The description of a converted model that memory, limits and the API need."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from memory.attention.seam import AttentionLayer
from serve.converter.capture import Captured
from serve.converter.graph import CONSTANT, Graph, Value, ancestors
from serve.converter.interface import unsupported
from serve.errors import ModelLoadError
from serve.models import ModelSpec, ParameterCounts, read_generation_defaults
from serve.models.families.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from serve.models.shard import WHOLE, Shard
from serve.models.spec import DTYPES


def attention_layers(
    graph: Graph, constants: Mapping[Value, Any] | None = None, shard: Shard = WHOLE
) -> list[AttentionLayer]:
    """Returns the attentions of a graph as the seam sees them, or those of a shard with its heads.
    ModelLoadError for shapes that it does not have. constants: known when weights are, and so are
    sinks."""
    attentions = graph.attentions
    numbers = shard.numbers(len(attentions))
    return [_layer(attentions[number], constants or {}, shard) for number in numbers]


def _layer(value: Value, constants: Mapping[Value, Any], shard: Shard) -> AttentionLayer:
    q, k, v = (x.shape for x in value.args[:3])
    sinks, scale, window, cap = value.args[3:]
    if sinks is not None and sinks.kind != CONSTANT:
        raise unsupported("sinks of attention that depend on the input")
    assert q is not None and k is not None and v is not None
    if k[1] != v[1] or q[1] % k[1] or q[3] != k[3] or v[3] > k[3]:
        raise unsupported(f"queries, keys and values of shapes {list(q)}, {list(k)} and {list(v)}")
    own_sinks = shard.own_rows(constants[sinks]) if sinks in constants else None
    return AttentionLayer(
        num_heads=q[1] // shard.size,
        num_kv_heads=k[1] // shard.size,
        head_dim=k[3],
        scale=scale,
        window=window or None,
        soft_cap=cap,
        sinks=None if own_sinks is None else tuple(own_sinks.float().tolist()),
    )


def make_spec(path: Path, captured: Captured, graph: Graph) -> ModelSpec:
    """Returns the description of an exported model. Of its layers only attention is described, and
    the norm's epsilon is not known."""
    config, hidden, logits = captured.config, graph.hidden.shape, graph.logits.shape
    assert hidden is not None and logits is not None
    mlp = MlpSpec(size=max(_count(config, "intermediate_size", 4 * hidden[-1]), _widest(graph)))
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.scale,
                window=layer.window,
                soft_cap=layer.soft_cap,
            ),
            mlp=mlp,
        )
        for layer in attention_layers(graph)
    )
    max_model_len = _count(config, "max_position_embeddings", 0)
    if not max_model_len:
        raise ModelLoadError(f"{path / 'config.json'}: max_position_embeddings is missing")
    return ModelSpec(
        model_type=config.model_type,
        torch_dtype=_dtype(path, config),
        vocab_size=logits[-1],
        hidden_size=hidden[-1],
        embed_size=hidden[-1],
        max_model_len=max_model_len,
        norm_eps=0.0,
        layers=layers,
        is_tied=captured.head in captured.ties,
        eos_token_ids=read_generation_defaults(path, is_converted=True)["eos_token_ids"],
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        counts=count(captured, graph),
    )


def _widest(graph: Graph) -> int:
    """Returns the most columns of a product before the hidden state, for which tensor ranks need
    room (serve/group/sizes.py)."""
    widths = [v.shape[-1] for v in ancestors([graph.hidden]) if v.is_product and v.shape]
    return max(widths, default=0)


def _count(config: Any, key: str, default: int) -> int:
    value = getattr(config, key, None)
    return value if type(value) is int and value > 0 else default


def _dtype(path: Path, config: Any) -> str:
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelLoadError(
            f"{path / 'config.json'}: dtype {name!r} is not supported; known: {known}"
        )
    return name


def count(captured: Captured, graph: Graph) -> ParameterCounts:
    """Returns the numbers of weights, by what they are for."""
    kinds: dict[str, str] = {}
    for value in graph.values:
        for each in value.inputs:
            if each.tensor:
                is_head = each.tensor == captured.head
                kind = "head" if is_head else "blocks" if value.is_product else "others"
                kinds[each.tensor] = "tables" if value.is_lookup else kind
    counts = ParameterCounts()
    for name, kind in kinds.items():
        source = captured.ties.get(name)
        if name in captured.shapes and not (kind == "tables" and captured.head in captured.ties):
            counts.add(kind, prod(captured.shapes[source or name]))
    return counts
