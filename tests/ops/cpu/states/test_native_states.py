"""Operators with a state, on every instruction set of this machine.

Results are compared with the reference in float64, and bit for bit with other cuts of the same rows
into segments, steps and batches.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_states import NativeStates
from ops.reference_states import ReferenceStates
from ops.states import NO_RECORD, Recurrence, StateSegments

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
OPS, REFERENCE = NativeStates(), ReferenceStates()
DTYPES = [torch.float32, torch.bfloat16]
# of the largest magnitude; a result in bf16 has 8 bits
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
KINDS = ["gated delta", "kda", "mamba2", "far betas"]
# heads, key heads, Dk, Dv
SHAPES = [(2, 1, 128, 128), (4, 4, 64, 96), (6, 2, 96, 16), (3, 3, 7, 5), (2, 2, 33, 50)]


class Layer(NamedTuple):
    """A rule, with random inputs: q, k, v, a, b."""

    rule: Recurrence
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]

    def rows(self, which: slice) -> Layer:
        q, k, v, a, b = self.inputs
        part = q[which], k[which], v[which], a[which], None if b is None else b[which]
        return Layer(self.rule, part)

    def run(
        self, states: Tensor, segments: StateSegments, ops: NativeStates | ReferenceStates = OPS
    ) -> Tensor:
        return ops.linear_attention(*self.inputs, self.rule, states, segments)


def layer_of(
    kind: str, rows: int, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> Layer:
    heads, key_heads, key_dim, value_dim = shape
    per_channel, is_delta = kind == "kda", kind != "mamba2"
    channels = (heads, key_dim) if per_channel else (heads,)
    has_unit_keys = kind in ("gated delta", "kda")
    size = 1.0 if has_unit_keys else key_dim**-0.5
    rule = Recurrence(
        rates=torch.rand(heads) * 4 + 0.1,
        bias=torch.randn(channels) - 2,
        is_delta=is_delta,
        scale=key_dim**-0.5,
        has_unit_keys=has_unit_keys,
        beta_scale=2.0 if kind == "far betas" else 1.0,
        dt_min=1e-3 if kind == "mamba2" else 0.0,
        dt_max=0.2 if kind == "mamba2" else float("inf"),
        skip=torch.randn(heads) if kind == "mamba2" else None,
    )
    q, k = (torch.randn(rows, key_heads, key_dim) * size for _ in range(2))
    v, a = torch.randn(rows, heads, value_dim), torch.randn(rows, *channels)
    b = torch.randn(rows, heads).to(dtype) if is_delta else None
    return Layer(rule, (q.to(dtype), k.to(dtype), v.to(dtype), a.to(dtype), b))


def segments_of(*sequences: list[tuple[int, int, int]]) -> StateSegments:
    """Each sequence is a list of segments: rows, source, target."""
    flat = [segment for sequence in sequences for segment in sequence]
    lengths = torch.tensor([0, *(rows for rows, _, _ in flat)])
    counts = torch.tensor([0, *map(len, sequences)])
    sources, targets = (torch.tensor([s[i] for s in flat], dtype=torch.int64) for i in (1, 2))
    return StateSegments(lengths.cumsum(0), sources, targets, counts.cumsum(0))


def cut(rows: int, record: int) -> list[tuple[int, int, int]]:
    """Cuts a sequence's rows at random; its state stays in one record, from zeros on."""
    parts, source = [], NO_RECORD
    while rows:
        part = int(torch.randint(1, rows + 1, ()))
        part = min(part, int(torch.randint(1, 90, ())))
        parts.append((part, source, record))
        rows, source = rows - part, record
    return parts


def check(found: Tensor, exact: Tensor, bound: float) -> None:
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < bound


def is_same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.float().view(torch.int32), expected.float().view(torch.int32))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_attention_against_float64(isa, dtype, kind, shape):
    heads, _, key_dim, value_dim = shape
    layer = layer_of(kind, 161, shape, dtype)
    states = torch.randn(5, heads, key_dim, value_dim) * 0.3
    exact, before = states.double(), states.clone()
    segments = segments_of(
        [(130, 3, 3)],
        [(5, NO_RECORD, 1), (20, 1, NO_RECORD)],
        [(4, 2, 0), (1, 0, 0), (1, 2, NO_RECORD)],
    )
    wide = Layer(layer.rule, tuple(None if x is None else x.double() for x in layer.inputs))
    expected = wide.run(exact, segments, REFERENCE)
    found = layer.run(states, segments)
    assert found.dtype == dtype
    check(found, expected, BOUND[dtype])
    for record in (0, 1, 3):
        check(states[record], exact[record], BOUND[torch.float32])
    for record in (2, 4):
        assert torch.equal(states[record], before[record])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_attention_has_the_same_bits_however_rows_are_cut(isa, kind, shape):
    rows, heads, _, key_dim, value_dim = 150, *shape
    layer = layer_of(kind, rows, shape)
    records = torch.zeros(4, heads, key_dim, value_dim)
    whole = layer.run(records, segments_of([(rows, NO_RECORD, 0)]))
    assert is_same(layer.run(records, segments_of(cut(rows, 1))), whole)
    assert is_same(layer.run(records, segments_of([(1, -1, 2)] + [(1, 2, 2)] * (rows - 1))), whole)
    first, steps, parts = 0, [], cut(rows, 3)
    for size, source, target in parts:
        part = layer.rows(slice(first, first + size))
        steps.append(part.run(records, segments_of([(size, source, target)])))
        first += size
    assert is_same(torch.cat(steps), whole)
    for record in (1, 2, 3):
        assert is_same(records[record], records[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_linear_attention_does_not_depend_on_batch_and_threads(isa, kind, shape):
    heads, _, key_dim, value_dim = shape
    lengths = [1, 70, 2, 1, 1, 129, 17, 1]
    layer, count = layer_of(kind, sum(lengths), shape), len(lengths)
    start = torch.randn(count, heads, key_dim, value_dim)
    alone, outs, first = start.clone(), [], 0
    threads = native_library.num_threads()
    try:
        native_library.set_num_threads(1)
        for record, size in enumerate(lengths):
            part = layer.rows(slice(first, first + size))
            outs.append(part.run(alone, segments_of([(size, record, record)])))
            first += size
        expected = torch.cat(outs)
        for used in (1, 2):
            native_library.set_num_threads(used)
            states = start.clone()
            segments = segments_of(*([(size, i, i)] for i, size in enumerate(lengths)))
            assert is_same(layer.run(states, segments), expected)
            assert is_same(states, alone)
    finally:
        native_library.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_attention_of_strided_rows_and_records(isa, dtype):
    heads, key_heads, key_dim, value_dim = 4, 2, 24, 40
    layer = layer_of("gated delta", 9, (heads, key_heads, key_dim, value_dim), dtype)
    segments = segments_of([(9, 1, 2)])
    states = torch.randn(3, heads, key_dim, value_dim)
    size = states[0].numel()
    memory = torch.full((3, 2 * size + 5), 7.0)
    records = memory[:, 3 : 3 + size].view(3, heads, key_dim, value_dim)
    records.copy_(states)
    expected = layer.run(states, segments)
    strided = []
    for x in layer.inputs:
        assert x is not None
        padded = torch.full((9, x[0].numel() + 3), 5.0, dtype=dtype)
        padded[:, 2:-1] = x.reshape(9, -1)
        strided.append(padded[:, 2:-1].view(x.shape))
    assert is_same(Layer(layer.rule, tuple(strided)).run(records, segments), expected)
    assert torch.equal(records, states)
    memory[:, 3 : 3 + size] = 7.0
    assert bool((memory == 7.0).all())


def test_nan_stays_in_its_sequence_and_head(isa):
    layer = layer_of("gated delta", 4, (2, 2, 16, 16))
    states = torch.randn(2, 2, 16, 16)
    broken, segments = states.clone(), segments_of([(2, 0, 0)], [(2, 1, 1)])
    expected = layer.run(states, segments)
    layer.inputs[2][1, 1, 3] = torch.nan
    found = layer.run(broken, segments)
    assert bool(found[1, 1, 3].isnan()) and bool(broken[0, 1, :, 3].isnan().all())
    for ours, theirs in ((found[1, 1], expected[1, 1]), (broken[0, 1], states[0, 1])):
        ours[..., 3] = theirs[..., 3] = 0
    assert torch.equal(found, expected) and torch.equal(broken, states)


def test_far_gates_are_finite_and_exact(isa):
    """Steps of 0 and of 1e4, gates that are shut and open."""
    layer = layer_of("gated delta", 4, (1, 1, 16, 16))
    _, _, _, a, b = layer.inputs
    a[:, 0] = torch.tensor([-200.0, 1e4, -50.0, 0.0])
    b[:, 0] = torch.tensor([-1e4, 1e4, 90.0, -90.0])
    states = torch.randn(1, 1, 16, 16)
    exact, segments = states.double(), segments_of([(4, 0, 0)])
    expected = layer.run(exact, segments, REFERENCE)
    check(layer.run(states, segments), expected, 1e-5)
    check(states, exact, 1e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize(("channels", "activation"), [(96, "silu"), (1100, "silu"), (37, None)])
def test_convolution_against_float64(isa, dtype, width, channels, activation):
    x = torch.randn(40, channels).to(dtype)
    weight, bias = torch.randn(channels, width), torch.randn(channels) if width % 2 else None
    states = torch.randn(4, width - 1, channels)
    exact, before = states.double(), states.clone()
    segments = segments_of([(30, NO_RECORD, 1), (1, 1, 1), (2, 1, 0)], [(7, 2, NO_RECORD)])
    expected = REFERENCE.causal_conv(x.double(), weight, bias, activation, exact, segments)
    found = OPS.causal_conv(x, weight, bias, activation, states, segments)
    assert found.dtype == dtype
    check(found, expected, BOUND[dtype])
    assert torch.equal(states.double(), exact) and torch.equal(states[2:], before[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 5])
def test_convolution_has_the_same_bits_however_rows_are_cut(isa, dtype, width):
    rows, channels = 60, 200
    memory = torch.randn(rows + 5, channels + 13).to(dtype)
    x = memory[:rows, 6 : 6 + channels]
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    size = (width - 1) * channels
    states = torch.zeros(3, 2 * size)[:, 5 : 5 + size].view(3, width - 1, channels)

    def run(part: Tensor, *sequences: list[tuple[int, int, int]]) -> Tensor:
        return OPS.causal_conv(part, weight, bias, "silu", states, segments_of(*sequences))

    whole = run(x, [(rows, NO_RECORD, 0)])
    assert is_same(run(x.contiguous(), cut(rows, 1)), whole)
    assert is_same(states[1], states[0])
    first, steps = 0, []
    for size, source, target in cut(rows, 2):
        other = memory[first : first + size + 5, 6 : 6 + channels]  # with rows of another sequence
        sequences = [(size, source, target)], [(5, NO_RECORD, NO_RECORD)]
        steps.append(run(other, *sequences)[:size])
        first += size
    assert is_same(torch.cat(steps), whole) and is_same(states[2], states[0])
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    assert is_same(run(x, [(rows, NO_RECORD, 0)]), whole)
    native_library.set_num_threads(threads)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("size", "group"), [(512, 128), (96, 96), (66, 33), (10, 5), (9000, 9000)])
def test_gated_norm_against_float64(isa, dtype, activation, gates_first, size, group):
    memory, gate = torch.randn(7, 3 * size).to(dtype), torch.randn(7, size).to(dtype)
    x = memory[:, size - 1 : 2 * size - 1]
    for weight in (None, torch.randn(size)):
        args = {"group": group, "activation": activation, "gates_first": gates_first}
        found = OPS.gated_norm(x, gate, weight, 1e-6, **args)
        assert found.dtype == dtype
        check(found, exact_norm(x, gate, weight, 1e-6, **args), BOUND[dtype])
        for first, end in ((0, 1), (3, 7)):
            part = OPS.gated_norm(x[first:end], gate[first:end], weight, 1e-6, **args)
            assert is_same(part, found[first:end])


def exact_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    group: int,
    activation: str,
    gates_first: bool,
) -> Tensor:
    wide, opening = x.double(), gate.double()
    opening = opening.sigmoid() * (opening if activation == "silu" else 1)
    if weight is None:
        return wide * opening
    wide = wide * opening if gates_first else wide
    grouped = wide.view(len(x), -1, group)
    wide = (grouped / (grouped.square().mean(-1, keepdim=True) + eps).sqrt()).view(x.shape) * weight
    return wide if gates_first else wide * opening


def test_no_rows(isa):
    layer = layer_of("kda", 0, (2, 2, 16, 16))
    none = segments_of()
    assert layer.run(torch.zeros(1, 2, 16, 16), none).shape == (0, 2, 16)
    x, weight = torch.empty(0, 8), torch.zeros(8, 4)
    assert OPS.causal_conv(x, weight, None, None, torch.zeros(1, 3, 8), none).shape == (0, 8)
    assert OPS.gated_norm(x, x, weight[:, 0], 1e-6, group=8, activation="silu").shape == (0, 8)


@pytest.mark.parametrize(
    ("sequences", "why"),
    [
        ([[(4, 2, 0)]], "no such record"),
        ([[(4, 0, -2)]], "no such record"),
        ([[(3, 0, 0)]], "firsts"),
        ([[(4, 0, 0), (0, 0, 0)]], "firsts"),
        ([[(4, 0, 0)], []], "sequences"),
    ],
)
def test_wrong_segments_are_refused(sequences, why):
    layer, states = layer_of("mamba2", 4, (2, 1, 16, 16)), torch.ones(2, 2, 16, 16)
    with pytest.raises(ValueError, match=why):
        layer.run(states, segments_of(*sequences))
    x, weight, inputs = torch.ones(4, 8), torch.ones(8, 4), torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=why):
        OPS.causal_conv(x, weight, None, None, inputs, segments_of(*sequences))
    assert bool((states == 1).all())


def test_the_back_end_has_them():
    backend = CpuBackend()
    assert isinstance(backend.states, NativeStates)
    backend = CpuBackend()
    backend._has_native = False
    assert isinstance(backend.states, ReferenceStates)
