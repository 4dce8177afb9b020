"""What a group's shared memory and windows have to hold, and opening the exchange of a stage."""

from __future__ import annotations

from serve.config import EngineConfig
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.slots import ring_bytes
from serve.group.grid import Grid
from serve.group.links.stage_link import largest_hidden
from serve.loading.model_source import ModelSource
from serve.models import ModelSpec
from serve.models.families.layer_spec import AttentionSpec, MixtureSpec, MlpSpec
from serve.runner.prompt_reader import LOGITS_BYTES
from transport.arena import Arena

BARRIER_DEADLINE_S = 60.0  # a rank may be busy; a dead one is seen by the engine's watch
# A rank that sleeps in a barrier is late for the next one, as waking it takes as long as a product.
SPIN_S, SHARED_SPIN_S = 1e-3, 20e-6
_PAGE_BYTES = 4096  # windows are whole pages
_WIDE = 4  # bytes of the widest number


def largest_result(config: EngineConfig, spec: ModelSpec) -> int:
    """Returns the bytes of the largest result that the ranks of a stage compute together."""
    rows = config.batched_tokens
    prompt_logits = min(rows * spec.vocab_size * _WIDE, LOGITS_BYTES)
    sampled = config.max_num_seqs * max(spec.vocab_size, spec.embed_size) * _WIDE
    return max(rows * _widest_row(spec) * _WIDE, sampled, prompt_logits)


def _widest_row(spec: ModelSpec) -> int:
    """Returns the most columns of a layer's result."""
    widths = [spec.hidden_size, spec.embed_size]
    if spec.per_layer_vocab:
        widths.append(spec.num_layers * spec.layers[0].per_layer_input)
    for layer in set(spec.layers):
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, AttentionSpec):
            widths.append(attention.q_size)
        elif attention is not None:
            widths.append(attention.num_heads * attention.v_dim)
        if isinstance(mlp, MlpSpec):
            widths.append(mlp.size)
        elif isinstance(mlp, MixtureSpec):
            widths.append(mlp.expert.size * mlp.router.top_k)
            widths += [each.size for each in (mlp.shared, mlp.dense) if each is not None]
    return max(widths)


def arena_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    return ring_bytes(1, largest_result(config, spec))


def stage_window_bytes(config: EngineConfig, spec: ModelSpec, num_stages: int) -> int:
    """Returns the window of a stage for the hidden states of steps in flight."""
    largest = largest_hidden(config.batched_tokens, spec.hidden_size)
    return max(1 << 20, _rounded(2 * num_stages * largest))


def sibling_window_bytes(spec: ModelSpec, tensor: int) -> int:
    """Returns the window of a connection between tensor ranks, whose messages, of a quarter, hold
    at least two rows of the widest result."""
    row = max(_widest_row(spec), spec.vocab_size, spec.embed_size) * _WIDE
    return max(16 << 20, _rounded(16 * row // tensor))


def _rounded(num_bytes: int) -> int:
    """Returns the next size that a window can have."""
    return -(-num_bytes // 4096) * 4096


def spin_s(num_ranks: int, num_processors: int) -> float:
    """Returns how long a barrier spins on a host: shortly if ranks take turns on its processors."""
    return SPIN_S if num_ranks <= num_processors else SHARED_SPIN_S


def open_exchange(
    source: ModelSource, grid: Grid, tensor: int, arena: object, spins_s: object
) -> ArenaExchange | None:
    """Opens the exchange of a tensor rank; arena: where it can be opened. spins_s: the time that a
    barrier spins. None for one rank."""
    if grid.tensor == 1:
        return None
    if not isinstance(arena, str):
        raise ValueError("several tensor ranks without an arena")
    largest = largest_result(source.config, source.spec)
    opened = Arena.open(arena, tensor)
    if isinstance(spins_s, float):
        opened.spin_s = min(max(spins_s, 0.0), SPIN_S)
    return ArenaExchange(opened, 1, largest, BARRIER_DEADLINE_S)
