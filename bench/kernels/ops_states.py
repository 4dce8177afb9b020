"""The cases of operators with a state for `serve bench ops`, at shapes of published models.

A row of each sequence reads and writes the states, which memory bounds; rows of a prompt go through
a state that caches hold, which multiply-adds bound. Layers rotate through more memory than the
caches hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.ops_linear import FAR, Case, Run, Timed
from ops.cpu.native_ceilings import Ceilings
from ops.cpu.native_states import NativeStates
from ops.states import Recurrence, StateSegments

_OPS = NativeStates()
_PIECE = 128 << 20
_CHANNELS, _WIDTH, _NORMED, _GROUP = 8192, 4, 4096, 128  # of Qwen3.5-4B


class StateShape(NamedTuple):
    """The heads of a published model."""

    name: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    is_delta: bool = True
    is_per_channel: bool = False

    def rule(self) -> Recurrence:
        decays = (self.heads, self.key_dim) if self.is_per_channel else (self.heads,)
        rates, bias, scale = torch.rand(self.heads) + 0.5, torch.randn(decays) - 2, 0.09
        return Recurrence(rates, bias, self.is_delta, scale, has_unit_keys=self.is_delta)


SHAPES = (
    StateShape("gated delta", 32, 16, 128, 128),  # Qwen3.5-4B
    StateShape("KDA", 32, 32, 128, 128, is_per_channel=True),  # Kimi Linear
    StateShape("Mamba-2", 64, 1, 128, 64, is_delta=False),  # Mamba-2 1.3B
)
SMALL = (StateShape("gated delta", 2, 1, 16, 16),)


class Rows(NamedTuple):
    """The inputs of linear attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None

    @classmethod
    def random(cls, shape: StateShape, rows: int) -> Rows:
        """Draws rows as a convolution gives them: queries, keys and values side by side."""
        _, heads, key_heads, key_dim, value_dim, is_delta, is_per_channel = shape
        sizes = (key_heads * key_dim, key_heads * key_dim, heads * value_dim)
        q, k, v = torch.randn(rows, sum(sizes)).bfloat16().split_with_sizes(sizes, 1)
        decays = (heads, key_dim) if is_per_channel else (heads,)
        return cls(
            q.view(rows, key_heads, key_dim),
            k.view(rows, key_heads, key_dim),
            v.view(rows, heads, value_dim),
            torch.randn(rows, *decays).bfloat16(),
            torch.randn(rows, heads).bfloat16() if is_delta else None,
        )


def state_cases(quick: bool) -> Iterator[Case]:
    for shape in SMALL if quick else SHAPES:
        for sequences in (1,) if quick else (1, 8):
            yield _decode_case(shape, sequences, quick)
        yield _prompt_case(shape, 8 if quick else 512)
    for sequences, rows in ((1, 1),) if quick else ((1, 1), (8, 1), (1, 512)):
        yield _conv_case(sequences, rows, quick)
    for rows in (1,) if quick else (1, 8, 512):
        yield _norm_case(rows, quick)


def _segments(sequences: int, rows: int) -> StateSegments:
    """Returns sequences with so many rows each, which keep their states in place."""
    numbers = torch.arange(sequences)
    return StateSegments(
        torch.arange(sequences + 1) * rows, numbers, numbers, torch.arange(sequences + 1)
    )


def _decode_case(shape: StateShape, sequences: int, quick: bool) -> Case:
    _, heads, key_heads, key_dim, value_dim, *_ = shape
    size_bytes = 4 * sequences * heads * key_dim * value_dim
    count = 2 if quick else FAR // size_bytes
    states = torch.randn(count, sequences, heads, key_dim, value_dim)
    rule, rows, none = shape.rule(), Rows.random(shape, sequences), Rows.random(shape, 0)
    return Case(
        f"{shape.name} decode",
        f"B={sequences} H={heads}/{key_heads} {key_dim}x{value_dim}",
        "moved",
        2.0 * size_bytes * count,
        0.8,
        Timed(
            partial(_attend_all, rule, rows, states, _segments(sequences, 1)),
            partial(_attend_all, rule, none, states, _segments(0, 1)),
        ),
        beside=_copying(size_bytes * count),
        rows=sequences * count,
    )


def _prompt_case(shape: StateShape, rows: int) -> Case:
    _, heads, key_heads, key_dim, value_dim, is_delta, _ = shape
    states = torch.zeros(1, 1, heads, key_dim, value_dim)
    inputs, rule = Rows.random(shape, rows), shape.rule()
    # decay, sums of q and k over the state, and the product that is added to it
    per_number = 7 if is_delta else 5
    work = float(per_number * rows * heads * key_dim * value_dim)
    peer = _chunked(rule, inputs) if shape.name == "gated delta" else None
    return Case(
        f"{shape.name} prompt",
        f"M={rows} H={heads}/{key_heads} {key_dim}x{value_dim}",
        "f32",
        work,
        0.3,
        Timed(partial(_attend_all, rule, inputs, states, _segments(1, rows))),
        peer=peer,
        peer_work=work if peer else 0.0,
        rows=rows,
    )


def _chunked(rule: Recurrence, rows: Rows) -> Run | None:
    """Returns the same in transformers' torch code, which goes through a prompt in chunks of 64
    rows, or None without transformers."""
    try:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
    except ImportError:
        return None
    assert rows.b is not None
    shared = rows.v.shape[1] // rows.k.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1)[None] for x in (rows.q, rows.k))
    decays = -rule.rates * torch.nn.functional.softplus(rows.a.float() + rule.bias)
    arguments = (q, k, rows.v[None], decays[None], rows.b.sigmoid()[None])
    return partial(
        torch_chunk_gated_delta_rule,
        *arguments,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _conv_case(sequences: int, rows: int, quick: bool) -> Case:
    channels = 64 if quick else _CHANNELS
    weight = torch.randn(channels, _WIDTH)
    x = torch.randn(sequences * rows, channels).bfloat16()
    record_bytes = 4 * (_WIDTH - 1) * channels
    # a layer's states, weights, inputs and outputs, each read or written once
    moved = 2 * sequences * record_bytes + 4 * weight.numel() + 2 * 2 * x.numel()
    count = 2 if quick else min(1000, FAR // moved)
    states = torch.randn(count, sequences, _WIDTH - 1, channels)
    weights, inputs = weight.repeat(count, 1, 1), x.repeat(count, 1, 1)
    return Case(
        "causal conv",
        f"B={sequences} M={sequences * rows} C={channels} W={_WIDTH}",
        "moved",
        float(moved * count),
        0.0,
        Timed(
            partial(_convolve_all, inputs, weights, states, _segments(sequences, rows)),
            partial(_convolve_all, inputs[:, :0], weights, states, _segments(0, 1)),
        ),
        beside=_copying(moved * count // 2),
        rows=len(x) * count,
    )


def _norm_case(rows: int, quick: bool) -> Case:
    size = 256 if quick else _NORMED
    moved = 3 * 2 * rows * size  # the rows, their gates and the results
    count = 2 if quick else min(1000, FAR // moved)
    x = torch.randn(count, 2, rows, size).bfloat16()
    weight = torch.randn(size)
    return Case(
        "gated norm",
        f"M={rows} N={size} groups of {_GROUP}",
        "moved",
        float(moved * count),
        0.0,
        Timed(partial(_norm_all, x, weight), partial(_norm_all, x[:, :, :0], weight)),
        beside=_copying(moved * count // 2),
        rows=rows * count,
    )


def _copying(size_bytes: int) -> Timed:
    """Returns copies that read and write so many bytes, in memory that no cache holds."""
    source, target = (torch.ones(min(size_bytes, _PIECE), dtype=torch.uint8) for _ in range(2))
    sizes = [_PIECE] * (size_bytes // _PIECE) + [size_bytes % _PIECE]
    return Timed(partial(_copy_all, target, source, sizes))


def _copy_all(target: Tensor, source: Tensor, sizes: list[int]) -> None:
    for size in sizes:
        Ceilings.copy(target, source[:size])


def _attend_all(rule: Recurrence, rows: Rows, states: Tensor, segments: StateSegments) -> None:
    for layer in states:
        _OPS.linear_attention(*rows, rule, layer, segments)


def _convolve_all(x: Tensor, weights: Tensor, states: Tensor, segments: StateSegments) -> None:
    for part, weight, layer in zip(x, weights, states, strict=True):
        _OPS.causal_conv(part, weight, None, "silu", layer, segments)


def _norm_all(x: Tensor, weight: Tensor) -> None:
    for part, gate in x:
        _OPS.gated_norm(part, gate, weight, 1e-6, group=_GROUP, activation="silu")
