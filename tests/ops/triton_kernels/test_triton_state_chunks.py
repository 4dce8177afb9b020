"""The recurrence in chunks against fp64, and what its bits depend on.

In the interpreter where there is no GPU.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.cuda import states as cuda_states
from ops.cuda.states import CudaStates
from ops.states import NO_RECORD, StateSegments
from ops.triton_kernels.state_chunks import LONG_ROWS, plan_kernel
from tests.support.cuda.state_steps import (
    DEVICE,
    Operands,
    Shape,
    exact_attention,
    make_operands,
    make_rule,
    make_states,
    segments_of,
)
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("seeded")

LONG = 40
KINDS = ("delta", "mamba", "free")
# Differences that ops/triton_kernels/state_chunks.py promises, of the largest number.
BOUND = 1e-4


def wide_values(operands: Operands) -> Operands:
    """Returns operands whose outputs are not rounded."""
    return operands._replace(v=operands.v.float())


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    error = (found.double().cpu() - want).abs().max() / want.abs().max()
    assert error < BOUND, f"{error:.2e}"
    assert error > 0


@pytest.mark.parametrize("kind", every_day((0, 2), KINDS))
@pytest.mark.parametrize(
    "dims", every_day((0,), [((4, 2, 16, 24),), ((2, 1, 48, 40),), ((1, 1, 128, 20),)])
)
def test_chunks(dims, kind):
    """Long sequences with whole and partial chunks, chains and segments of few rows, among short
    ones, whose bits are those of rows one by one."""
    shape = Shape(*dims)
    rule = make_rule(kind, shape)
    operands = wide_values(make_operands(210, shape, rule, torch.bfloat16))
    segments = segments_of(
        [(3, NO_RECORD, 0)],
        [(130, 1, 1)],
        [(5, NO_RECORD, 2), (64, 2, 3), (0, 3, 3), (1, 3, 2)],
        [],
        [(7, 4, NO_RECORD)],
    )
    states = make_states(6, shape.heads, shape.key_dim, shape.value_dim)
    by_rows = states.clone()
    want, after = exact_attention(operands, rule, states, segments)
    found = CudaStates(LONG).linear_attention(*operands, rule, states, segments)
    alone = CudaStates(None).linear_attention(*operands, rule, by_rows, segments)
    assert_near(found, want)
    assert_near(states, after)
    for rows in (slice(0, 3), slice(203, 210)):
        assert torch.equal(found[rows], alone[rows])
    assert torch.equal(states[0], by_rows[0]) and torch.equal(states[4:], by_rows[4:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_forget_much_round_no_others(kind):
    """Of 64 rows some have a decay of e^-1000, and others hardly any."""
    shape = Shape(2, 1, 32, 16)
    rule = make_rule(kind, shape)._replace(dt_min=0.0, dt_max=float("inf"))
    operands = wide_values(make_operands(200, shape, rule, torch.bfloat16))
    operands.a.mul_(3.0).sub_(8.0)
    operands.a[::37] = 1000.0
    states, segments = make_states(1, 2, 32, 16), segments_of([(200, 0, 0)])
    want, after = exact_attention(operands, rule, states, segments)
    found = CudaStates(LONG).linear_attention(*operands, rule, states, segments)
    assert_near(found, want)
    assert_near(states, after)


def test_equal_keys():
    """I + A is then as far from I as it can be: powers of A have numbers of 10^18."""
    shape = Shape(2, 1, 16, 16)
    rule = make_rule("delta", shape)._replace(rates=torch.full((2,), 1e-4, device=DEVICE))
    operands = wide_values(make_operands(128, shape, rule, torch.bfloat16))
    operands.k.copy_(operands.k[:1].clone().expand_as(operands.k))
    assert operands.b is not None
    operands.b.copy_(torch.full_like(operands.b, 20.0))
    states, segments = make_states(1, 2, 16, 16), segments_of([(128, NO_RECORD, 0)])
    want, after = exact_attention(operands, rule, states, segments)
    found = CudaStates(LONG).linear_attention(*operands, rule, states, segments)
    assert_near(found, want)
    assert_near(states, after)


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_at_multiples_of_64_change_no_bit(kind):
    shape = Shape(2, 1, 16, 16)
    rule = make_rule(kind, shape)
    operands = make_operands(200, shape, rule, torch.bfloat16)
    ops, states = CudaStates(LONG), make_states(6, 2, 16, 16)
    want = ops.linear_attention(*operands, rule, states, segments_of([(200, NO_RECORD, 0)]))
    cut = segments_of([(128, NO_RECORD, 1), (72, 1, 2)])
    assert torch.equal(ops.linear_attention(*operands, rule, states, cut), want)
    first = ops.linear_attention(
        *operands.rows(0, 64), rule, states, segments_of([(64, NO_RECORD, 3)])
    )
    others = Operands(*(None if x is None else torch.cat((x[:50], x[64:])) for x in operands))
    beside = segments_of([(50, NO_RECORD, NO_RECORD)], [(136, 3, 4)])
    rest = ops.linear_attention(*others, rule, states, beside)
    assert torch.equal(torch.cat((first, rest[50:])), want)
    assert torch.equal(states[2], states[0]) and torch.equal(states[4], states[0])


@pytest.mark.parametrize("seed", range(4))
def test_the_list_of_chunks(seed):
    """Some sequences are empty, some segments too; more of both than a program looks at once."""
    rng = random.Random(seed)
    sequences = [
        [(rng.choice((0, 1, 9, 63, 64, 65, 150)), 0, 0) for _ in range(rng.randrange(4))]
        for _ in range(rng.choice((3, 40)))
    ]
    sequences += [[(LONG, 0, 0)], [(LONG - 1, 0, 0)]]
    segments = segments_of(*sequences)
    want, row = [], 0
    for pieces in sequences:
        is_long = sum(rows for rows, _, _ in pieces) >= LONG
        for rows, _, _ in pieces:
            starts = range(0, rows if is_long else 0, 64)
            want += [(row + start, min(64, rows - start)) for start in starts]
            row += rows
    slots = row // 64 + len(segments.sources)
    assert len(want) <= slots
    chunks = torch.full((2 * slots + 1,), -7, device=DEVICE)
    plan_kernel[(1,)](
        segments.firsts, segments.sequences, chunks, chunks[-1:], len(sequences), slots, LONG,
        SEGMENTS=8, SEQUENCES=16,
    )  # fmt: skip
    found = chunks[:-1].view(2, slots).t().tolist()
    assert chunks[-1] == len(want)
    assert [tuple(chunk) for chunk in found[: len(want)]] == want
    assert all(chunk == [-7, -7] for chunk in found[len(want) :])


def test_which_rows_are_computed_in_chunks(monkeypatch):
    """Those of bf16 with one decay for a head, in steps that have enough of them."""
    called: list[int] = []
    monkeypatch.setattr(cuda_states, "apply_chunks", lambda *args: called.append(args[-1]))

    def was_called(ops: CudaStates, rows: int, kind: str, dtype, key_dim: int = 16) -> bool:
        shape = Shape(1, 1, key_dim, 16)
        rule = make_rule(kind, shape)
        operands = make_operands(rows, shape, rule, dtype)
        segments: StateSegments = segments_of([(rows, NO_RECORD, NO_RECORD)])
        called.clear()
        ops.linear_attention(*operands, rule, make_states(1, 1, key_dim, 16), segments)
        return bool(called)

    ops = CudaStates(8)
    assert was_called(ops, 8, "delta", torch.bfloat16) and called == [8]
    assert was_called(ops, 8, "mamba", torch.bfloat16)
    assert not was_called(ops, 7, "delta", torch.bfloat16)
    assert not was_called(ops, 8, "kimi", torch.bfloat16)
    assert not was_called(ops, 8, "delta", torch.float32)
    assert not was_called(ops, 8, "delta", torch.bfloat16, 144)
    assert not was_called(CudaStates(None), 8, "delta", torch.bfloat16)
    assert was_called(CudaStates(), LONG_ROWS, "delta", torch.bfloat16)
    assert not was_called(CudaStates(), LONG_ROWS - 1, "delta", torch.bfloat16)
