"""Kernels of layers with a state against ops/reference_states.py in fp64, and bit for bit against
themselves, however rows are cut. In the interpreter where there is no GPU."""

from __future__ import annotations

import os
import random

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.cuda.backend import CudaBackend
from ops.cuda.states import CudaStates
from ops.reference_states import ReferenceStates
from ops.states import NO_RECORD, Recurrence, StateSegments
from ops.triton_kernels import state_rows
from tests.support.cuda.state_steps import (
    DEVICE,
    Operands,
    Shape,
    exact_attention,
    make_operands,
    make_rule,
    make_states,
    random_pieces,
    segments_of,
)
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("seeded")

TYPES = (torch.float32, torch.bfloat16)
# one rounding to the result's type; the interpreter truncates
STEPS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
KINDS = ("delta", "kimi", "mamba", "free")
# Records 0 to 5. In place, into another record, without one; chains; a record that is only read.
PIECES = (
    [(5, 0, 0)],
    [(1, NO_RECORD, 1), (2, 1, 2), (6, 2, 1)],
    [(3, 3, NO_RECORD)],
    [(1, 4, 4), (1, 4, 5)],
)
ROWS = 19


def test_the_backend_has_them_once():
    backend = CudaBackend()
    assert isinstance(backend.states, CudaStates) and backend.states is backend.states


# ---- the convolution


def convolve(
    x: torch.Tensor, states: torch.Tensor, segments: StateSegments, weight, bias, activation
) -> torch.Tensor:
    return CudaStates().causal_conv(x, weight, bias, activation, states, segments)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("width", "activation"), every_day((0, 1, 2), [(4, "silu"), (2, None), (8, "silu"), (3, None)])
)
def test_convolution(width, activation, dtype):
    x = torch.randn(ROWS, 90, device=DEVICE).to(dtype)[:, 7:77]
    weight, bias = torch.randn(70, width, device=DEVICE), torch.randn(70, device=DEVICE)
    states = make_states(6, width - 1, 70)
    for each in (bias, None):
        before, after = states.clone(), states.clone().double().cpu()
        segments = segments_of(*PIECES)
        found = convolve(x, before, segments, weight, each, activation)
        want = ReferenceStates().causal_conv(
            x.cpu().double(),
            weight.cpu().double(),
            None if each is None else each.cpu().double(),
            activation,
            after,
            StateSegments(*(part.cpu() for part in segments)),
        )
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.cpu().double(), want, rtol=STEPS[dtype], atol=1e-5)
        assert torch.equal(before.cpu(), after.float())  # inputs are copied


def test_convolution_of_a_turned_matrix_and_of_no_rows():
    x, weight = torch.randn(70, 9, device=DEVICE).t(), torch.randn(70, 4, device=DEVICE)
    states, segments = torch.zeros(1, 3, 70, device=DEVICE), segments_of([(9, -1, 0)])
    found = convolve(x, states, segments, weight, None, "silu")
    assert torch.equal(found, convolve(x.contiguous(), states, segments, weight, None, "silu"))
    assert torch.equal(states[0], x[6:])
    none = segments_of([(0, -1, NO_RECORD)])
    assert convolve(x[:0], states, none, weight, None, None).shape == (0, 70)
    assert torch.equal(states[0], x[6:])
    with pytest.raises(ValueError, match="'gelu' of a convolution"):
        convolve(x, states, segments, weight, None, "gelu")


@pytest.mark.parametrize("seed", every_day((0, 1), range(8)))
def test_no_bit_of_a_convolution_depends_on_cuts(seed, monkeypatch):
    rng, rows, width = random.Random(seed), 50, 4
    x = torch.randn(2 * rows, 70, device=DEVICE).bfloat16()
    weight, bias = torch.randn(70, width, device=DEVICE), torch.randn(70, device=DEVICE)
    states = make_states(6, width - 1, 70)
    whole = segments_of([(rows, -1, 0)], [(rows, -1, 1)])
    want = convolve(x, states, whole, weight, bias, "silu")
    assert torch.equal(states[0], x[rows - 3 : rows].float())
    # with programs of their own for some tiles of a segment
    monkeypatch.setattr(state_rows, "_ROWS_OF_A_PROGRAM", rng.choice((16, 33, 1000)))
    cut = segments_of(random_pieces(rng, rows, 2, 4), random_pieces(rng, rows, 3, 5))
    assert torch.equal(convolve(x, states, cut, weight, bias, "silu"), want)
    assert torch.equal(states[2:4], states[:2])


# ---- the recurrence


def attend(
    operands: Operands, rule: Recurrence, states: torch.Tensor, segments: StateSegments
) -> torch.Tensor:
    return CudaStates().linear_attention(*operands, rule, states, segments)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dims", every_day((0,), [((4, 2, 16, 24),), ((2, 2, 40, 8),), ((3, 1, 128, 20),)])
)
def test_recurrence(dims, kind, dtype):
    shape = Shape(*dims)
    rule = make_rule(kind, shape)
    operands = make_operands(ROWS, shape, rule, dtype)
    states = make_states(6, shape.heads, shape.key_dim, shape.value_dim)
    segments = segments_of(*PIECES)
    want, after = exact_attention(operands, rule, states, segments)
    found = attend(operands, rule, states, segments)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.cpu().double(), want, rtol=STEPS[dtype], atol=2e-5)
    torch.testing.assert_close(states.cpu().double(), after, rtol=1e-5, atol=1e-5)


def test_extreme_gates():
    """Steps from e^-30 to 30, betas of 0 and 1, decays of 0 and 1."""
    shape = Shape(2, 1, 16, 16)
    rule = make_rule("delta", shape)._replace(bias=torch.zeros(2, device=DEVICE))
    operands = make_operands(ROWS, shape, rule, torch.float32)
    operands.a.copy_(torch.linspace(-30, 30, 2 * ROWS, device=DEVICE).view(ROWS, 2))
    assert operands.b is not None
    operands.b.copy_(torch.linspace(-200, 200, 2 * ROWS, device=DEVICE).view(ROWS, 2))
    mamba = rule._replace(is_delta=False, has_unit_keys=False)
    for each, some in ((rule, operands), (mamba, operands._replace(b=None))):
        states = make_states(2, 2, 16, 16)
        segments = segments_of([(ROWS, 0, 1)])
        want, after = exact_attention(some, each, states, segments)
        found = attend(some, each, states, segments)
        torch.testing.assert_close(found.cpu().double(), want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(states.cpu().double(), after, rtol=2e-5, atol=2e-5)


def test_small_steps_have_the_precision_of_fp32():
    """Without decay the first output is dt times a known number."""
    shape = Shape(64, 1, 16, 1)
    zeros = torch.zeros(64, device=DEVICE)
    rule = Recurrence(zeros, zeros, False, 1.0)
    ones = torch.ones(1, 1, 16, device=DEVICE)
    a = torch.linspace(-40, 25, 64, device=DEVICE)[None]
    operands = Operands(ones, ones, torch.ones(1, 64, 1, device=DEVICE), a, None)
    found = attend(operands, rule, make_states(1, *shape[0:1], 16, 1), segments_of([(1, -1, -1)]))
    want = 16 * torch.nn.functional.softplus(a.double(), threshold=50)
    torch.testing.assert_close(found.double().view(1, 64), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", every_day((0,), range(4)))
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_a_recurrence_depends_on_cuts(kind, seed):
    """Neither on segments and steps, nor on the sequences beside it."""
    rng, rows, shape = random.Random(seed), 33, Shape(2, 1, 16, 24)
    rule = make_rule(kind, shape)
    operands = make_operands(2 * rows, shape, rule, torch.bfloat16)
    states = make_states(8, shape.heads, shape.key_dim, shape.value_dim)
    want = attend(operands, rule, states, segments_of([(rows, -1, 0)], [(rows, -1, 1)]))
    cut = segments_of(random_pieces(rng, rows, 2, 4), random_pieces(rng, rows, 3, 5))
    assert torch.equal(attend(operands, rule, states, cut), want)
    assert torch.equal(states[2:4], states[:2])
    row, source = 0, NO_RECORD
    while row < rows:  # in steps of its own
        end = min(rows, row + rng.choice((1, 1, 2, 9)))
        found = attend(operands.rows(row, end), rule, states, segments_of([(end - row, source, 6)]))
        assert torch.equal(found, want[row:end])
        row, source = end, 6
    assert torch.equal(states[6], states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_rows_change_nothing(kind):
    """Graphs have a fixed number of sequences and of segments."""
    shape = Shape(2, 2, 16, 16)
    rule = make_rule(kind, shape)
    operands = make_operands(2, shape, rule, torch.float32)
    some = make_states(3, shape.heads, shape.key_dim, shape.value_dim)
    pieces = ([(1, 0, 0)], [(1, -1, 1)])
    padding = ([(0, NO_RECORD, NO_RECORD)], [(0, 0, NO_RECORD), (0, 2, NO_RECORD)], [])
    weight = torch.randn(16, 4, device=DEVICE)
    x, inputs = operands.v[:, 0], make_states(3, 3, 16)
    found = []
    for each in (pieces, (*pieces, *padding)):
        states, taps, segments = some.clone(), inputs.clone(), segments_of(*each)
        out = attend(operands, rule, states, segments)
        found.append((out, states, convolve(x, taps, segments, weight, None, None), taps))
    for alone, padded in zip(*found, strict=True):
        assert torch.equal(alone, padded)
    assert torch.equal(found[1][1][2], some[2]) and torch.equal(found[1][3][2], inputs[2])


def test_a_segment_without_rows_copies_its_state():
    shape = Shape(2, 2, 16, 16)
    rule = make_rule("delta", shape)
    operands = make_operands(0, shape, rule, torch.float32)
    states, inputs = make_states(3, 2, 16, 16), make_states(3, 3, 16)
    segments = segments_of([(0, 0, 1)], [(0, NO_RECORD, 2)])
    assert attend(operands, rule, states, segments).shape == (0, 2, 16)
    convolve(operands.v[:, 0], inputs, segments, torch.randn(16, 4, device=DEVICE), None, None)
    for each in (states, inputs):
        assert torch.equal(each[1], each[0]) and not each[2].any()


# ---- the gated norm


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("groups", "group"), [(5, 24), (1, 200), (40, 128)])
def test_gated_norm(groups, group, activation, dtype):
    n = groups * group
    x, gate = (3 * torch.randn(4, n + 9, device=DEVICE).to(dtype)[:, 5 : 5 + n] for _ in range(2))
    weight = torch.randn(n, device=DEVICE)
    for each, gates_first in ((weight, False), (weight, True), (None, False)):
        found = CudaStates().gated_norm(
            x, gate, each, 1e-5, group=group, activation=activation, gates_first=gates_first
        )
        want = ReferenceStates().gated_norm(
            x.float(), gate.float(), each, 1e-5,
            group=group, activation=activation, gates_first=gates_first,
        )  # fmt: skip
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.float(), want, rtol=STEPS[dtype], atol=1e-5)
        alone = CudaStates().gated_norm(
            x[2:3], gate[2:3], each, 1e-5,
            group=group, activation=activation, gates_first=gates_first,
        )  # fmt: skip
        assert torch.equal(alone, found[2:3])


def test_gated_norm_of_large_gates_of_turned_and_of_no_rows():
    x = torch.randn(3, 64, device=DEVICE)
    gate = torch.linspace(-1000, 1000, 192, device=DEVICE).view(3, 64)
    weight = torch.ones(64, device=DEVICE)
    for activation in ("silu", "sigmoid"):
        how = {"group": 32, "activation": activation}
        found = CudaStates().gated_norm(x, gate, weight, 1e-5, **how)
        want = ReferenceStates().gated_norm(x, gate, weight, 1e-5, **how)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        turned = (each.t().contiguous().t() for each in (x, gate))
        assert torch.equal(CudaStates().gated_norm(*turned, weight, 1e-5, **how), found)
        assert CudaStates().gated_norm(x[:0], gate[:0], weight, 1e-5, **how).shape == (0, 64)
    with pytest.raises(ValueError, match="'relu' of a gate"):
        CudaStates().gated_norm(x, gate, weight, 1e-5, group=32, activation="relu")
