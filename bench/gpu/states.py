"""Kernels of layers that keep a state: convolution, recurrence and gated norm.

Shapes: "delta" are those of Qwen3-Next's Gated DeltaNet layers (16 heads of keys, 32 of values, 128
dims), "kimi" those of a Kimi Delta Attention layer (32 heads of 128), "mamba" those of a Mamba-2
layer with 128 heads of 64 dims, 8 groups and states of 128. Decode steps are bound by the bytes of
states; for prompts there is no such bound, so `rows_per_s` is what counts, in chunks and row by
row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.record import Figures, Record
from bench.gpu.timing import device, num_sets, relative_error, time_works
from ops.reference_states import ReferenceStates
from ops.states import NO_RECORD, Recurrence, StateSegments


class Layer(NamedTuple):
    """The heads of values and keys of a layer's recurrence, and their dims. channels: those of the
    convolution."""

    kind: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.key_dim * self.value_dim


LAYERS = (
    Layer("delta", 32, 16, 128, 128),
    Layer("kimi", 32, 32, 128, 128),
    Layer("mamba", 128, 8, 128, 64),
)
TINY = (Layer("delta", 2, 1, 16, 24), Layer("kimi", 2, 2, 16, 16), Layer("mamba", 2, 1, 16, 16))
_WIDTH = 4
# Errors of bf16 results against fp64, and of states in fp32; a wrong index is far outside.
_BOUND, _STATE_BOUND = 0.01, 1e-4


def run(record: Record) -> None:
    batches, layers, lengths = [64, 1], LAYERS, [(1, 8192), (8, 1024)]
    if record.is_dry:
        batches, layers, lengths = [2], TINY, [(1, 70)]
    for layer in layers:
        for batch in batches:
            record.run(f"{layer.kind} decode {batch}", partial(_decode, layer, batch))
        for count, rows in lengths:
            about = f"{count} x {rows}"
            if layer.kind != "kimi":
                chunks = partial(_prompts, layer, count, rows, 64)
                record.run(f"{layer.kind} prompts {about} in chunks", chunks)
            by_rows = partial(_prompts, layer, count, rows, None)
            record.run(f"{layer.kind} prompts {about} row by row", by_rows)
    layer = layers[0]
    for count, rows in ((batches[0], 1), *lengths):
        about = f"{count} x {rows}"
        record.run(f"convolution {about}", partial(_convolution, layer, count, rows))
        record.run(f"gated norm {about}", partial(_gated_norm, layer, count * rows))


def smoke(record: Record) -> None:
    """Checks every kernel against fp64, with sequences of one row and of several segments."""
    layers, pieces = LAYERS, [[1], [1], [150, 70], [5, 2], [0]]
    if record.is_dry:
        layers, pieces = TINY, [[1], [66, 3], [0]]
    for layer in layers:
        for long_rows in (None, 64) if layer.kind != "kimi" else (None,):
            name = f"{layer.kind} {'row by row' if long_rows is None else 'in chunks'}"
            record.run(name, partial(_check_recurrence, layer, pieces, long_rows))
    record.run("convolution", partial(_check_convolution, layers[0], pieces))
    record.run("gated norm", partial(_check_gated_norm, layers[0]))


# ---- operands


class Rows(NamedTuple):
    """The operands of a recurrence before its rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None


def _rule(layer: Layer) -> Recurrence:
    heads = layer.heads
    rates = 0.05 + torch.rand(heads, device=device())
    bias = torch.randn(heads, device=device()) - 2
    if layer.kind == "mamba":
        return Recurrence(rates, bias, False, 1.0, skip=torch.ones(heads, device=device()))
    if layer.kind == "kimi":
        bias = torch.randn(heads, layer.key_dim, device=device()) - 2
    return Recurrence(rates, bias, True, layer.key_dim**-0.5, has_unit_keys=True)


def _rows(layer: Layer, rows: int, rule: Recurrence) -> Rows:
    """Returns random bf16 rows, q, k and v side by side as a convolution leaves them."""
    _, heads, key_heads, key_dim, value_dim = layer
    sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    mixed = torch.randn(rows, layer.channels, device=device()).bfloat16()
    q, k, v = torch.split(mixed, sizes, 1)
    if not rule.has_unit_keys:
        k.mul_(key_dim**-0.5)
    a = torch.randn(rows, *rule.bias.shape, device=device()).bfloat16()
    b = torch.randn(rows, heads, device=device()).bfloat16() if rule.is_delta else None
    q, k = q.view(rows, key_heads, key_dim), k.view(rows, key_heads, key_dim)
    return Rows(q, k, v.view(rows, heads, value_dim), a, b)


def _segments(pieces: list[list[int]], *, begins: bool = False) -> StateSegments:
    """Returns sequences of segments with these rows. The state of sequence i is in record i, or
    none if it begins with its first row."""
    firsts, sources, targets, sequences = [0], [], [], [0]
    for record, sizes in enumerate(pieces):
        for number, size in enumerate(sizes):
            firsts.append(firsts[-1] + size)
            sources.append(NO_RECORD if begins and not number else record)
            targets.append(record)
        sequences.append(len(sources))
    parts = (firsts, sources, targets, sequences)
    return StateSegments(*(torch.tensor(part, device=device()) for part in parts))


def _attend(
    rows: Rows, rule: Recurrence, states: Tensor, segments: StateSegments, long_rows: int | None
) -> Tensor:
    from ops.cuda.states import CudaStates

    return CudaStates(long_rows).linear_attention(*rows, rule, states, segments)


# ---- times


def _decode(layer: Layer, batch: int) -> Figures:
    """Times a row of each of `batch` sequences. bytes: their states, read and written."""
    rule, segments = _rule(layer), _segments([[1]] * batch)
    rows = _rows(layer, batch, rule)
    size = batch * layer.state_bytes
    shape = (batch, layer.heads, layer.key_dim, layer.value_dim)
    states = [torch.zeros(shape, device=device()) for _ in range(num_sets(size))]
    works = [partial(_attend, rows, rule, each, segments, 64) for each in states]
    return time_works(works).figures(bytes=2 * size)


def _prompts(layer: Layer, count: int, length: int, long_rows: int | None) -> Figures:
    rule, segments = _rule(layer), _segments([[length]] * count, begins=True)
    rows = _rows(layer, count * length, rule)
    states = torch.zeros(count, layer.heads, layer.key_dim, layer.value_dim, device=device())
    timing = time_works([partial(_attend, rows, rule, states, segments, long_rows)])
    return timing.figures(rows_per_s=count * length / timing.seconds)


def _convolution(layer: Layer, count: int, length: int) -> Figures:
    from ops.cuda.states import CudaStates

    channels, size = layer.channels, 4 * count * length * layer.channels
    segments = _segments([[length]] * count)
    weight = torch.randn(channels, _WIDTH, device=device())
    states = torch.zeros(count, _WIDTH - 1, channels, device=device())
    works: list[Callable[[], object]] = []
    for _ in range(num_sets(size)):
        x = torch.randn(count * length, channels, device=device()).bfloat16()
        works.append(partial(CudaStates().causal_conv, x, weight, None, "silu", states, segments))
    return time_works(works).figures(bytes=size + 8 * states.numel())


def _gated_norm(layer: Layer, count: int) -> Figures:
    from ops.cuda.states import CudaStates

    width = layer.heads * layer.value_dim
    weight, size = torch.rand(width, device=device()), 6 * count * width
    works: list[Callable[[], object]] = []
    for _ in range(num_sets(size)):
        x, gate = torch.randn(2, count, width, device=device()).bfloat16()
        norm = partial(CudaStates().gated_norm, x, gate, weight, 1e-6)
        works.append(partial(norm, group=layer.value_dim, activation="silu"))
    return time_works(works).figures(bytes=size)


# ---- checks


def _check(found: Tensor, want: Tensor, bound: float = _BOUND) -> float:
    error = relative_error(found, want)
    assert error <= bound, f"error {error:.4g}, at most {bound} is right"
    return error


def _exact(x: Tensor) -> Tensor:
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def _exact_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _exact(x)


def _check_recurrence(layer: Layer, pieces: list[list[int]], long_rows: int | None) -> Figures:
    rule, segments = _rule(layer), _segments(pieces)
    rows = _rows(layer, int(segments.firsts[-1]), rule)
    shape = (len(pieces), layer.heads, layer.key_dim, layer.value_dim)
    states = torch.randn(shape, device=device())
    after = _exact(states)
    skip, b = _exact_or_none(rule.skip), _exact_or_none(rows.b)
    exact = rule._replace(rates=_exact(rule.rates), bias=_exact(rule.bias), skip=skip)
    q, k, v, a = map(_exact, rows[:4])
    where = StateSegments(*map(_exact, segments))
    want = ReferenceStates().linear_attention(q, k, v, a, b, exact, after, where)
    found = _attend(rows, rule, states, segments, long_rows)
    return {"error": _check(found, want), "state_error": _check(states, after, _STATE_BOUND)}


def _check_convolution(layer: Layer, pieces: list[list[int]]) -> Figures:
    from ops.cuda.states import CudaStates

    pieces = [sizes for sizes in pieces if all(sizes)]
    channels, segments = layer.channels, _segments(pieces)
    x = torch.randn(int(segments.firsts[-1]), channels, device=device()).bfloat16()
    weight = torch.randn(channels, _WIDTH, device=device())
    states = torch.randn(len(pieces), _WIDTH - 1, channels, device=device())
    after = _exact(states)
    want = ReferenceStates().causal_conv(
        _exact(x), _exact(weight), None, "silu", after, StateSegments(*map(_exact, segments))
    )
    found = CudaStates().causal_conv(x, weight, None, "silu", states, segments)
    assert torch.equal(states.cpu(), after.float()), "the inputs that are kept differ"
    return {"error": _check(found, want)}


def _check_gated_norm(layer: Layer) -> Figures:
    from ops.cuda.states import CudaStates

    width = layer.heads * layer.value_dim
    x, gate = torch.randn(2, 5, width, device=device()).bfloat16()
    weight = torch.rand(width, device=device())
    how = partial(ReferenceStates().gated_norm, eps=1e-6, group=layer.value_dim, activation="silu")
    want = how(x.float(), gate.float(), weight)
    norm = CudaStates().gated_norm
    found = norm(x, gate, weight, 1e-6, group=layer.value_dim, activation="silu")
    return {"error": _check(found, want)}
