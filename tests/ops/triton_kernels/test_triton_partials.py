"""Merging of partial attention (ops/triton_kernels/partials.py) against fp64."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.backend import Partial
from ops.reference import ReferenceBackend, attention_fp64
from ops.triton_kernels.partials import merge_into

pytestmark = pytest.mark.usefixtures("seeded")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def a_partial(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Partial:
    out = torch.randn(rows, heads, dim, device=DEVICE).to(dtype)
    return Partial(out, 4 * torch.randn(rows, heads, device=DEVICE))


def wide(part: Partial) -> Partial:
    return Partial(part.out.double(), part.lse.double())


def check(found: Partial, want: Partial) -> None:
    # one rounding to the result's type; the interpreter truncates
    step = 2.0**-7 if found.out.dtype == torch.bfloat16 else 2.0**-22
    torch.testing.assert_close(found.out.double(), want.out, rtol=step, atol=1e-6)
    torch.testing.assert_close(found.lse.double(), want.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 80), (2, 200)])
def test_merge_equals_the_reference_in_fp64(heads, dim, dtype):
    total, part = a_partial(4, heads, dim, torch.float32), a_partial(4, heads, dim, dtype)
    want = ReferenceBackend().merge_partials([wide(total), wide(part)])
    merge_into(total, part)
    check(total, want)


def test_a_part_of_some_rows_and_heads():
    """A node has some heads of some rows; all others keep their bits."""
    total, part = a_partial(6, 4, 32, torch.float32), a_partial(3, 2, 32, torch.bfloat16)
    kept = Partial(total.out.clone(), total.lse.clone())
    rows = torch.tensor([5, 0, 3], device=DEVICE)
    before = Partial(total.out[rows][:, 1:3].double(), total.lse[rows][:, 1:3].double())
    want = ReferenceBackend().merge_partials([before, wide(part)])
    merge_into(Partial(total.out[:, 1:3], total.lse[:, 1:3]), part, rows)
    check(Partial(total.out[rows][:, 1:3], total.lse[rows][:, 1:3]), want)
    total.out[rows, 1:3], total.lse[rows, 1:3] = kept.out[rows, 1:3], kept.lse[rows, 1:3]
    assert torch.equal(total.out, kept.out) and torch.equal(total.lse, kept.lse)


def test_values_of_no_key_are_not_read():
    total, part = a_partial(3, 2, 16, torch.float32), a_partial(3, 2, 16, torch.float32)
    wanted = [part.out[0].clone(), total.out[1].clone(), torch.zeros(2, 16, device=DEVICE)]
    lses = [part.lse[0].clone(), total.lse[1].clone(), torch.full((2,), -INF, device=DEVICE)]
    for x, row in ((total, 0), (part, 1), (total, 2), (part, 2)):
        x.out[row], x.lse[row] = float("nan"), -INF
    merge_into(total, part)
    torch.testing.assert_close(total.out, torch.stack(wanted))
    torch.testing.assert_close(total.lse, torch.stack(lses))


def test_log_sum_exps_of_any_size():
    total, part = a_partial(2, 1, 16, torch.float32), a_partial(2, 1, 16, torch.float32)
    total.lse[:] = torch.tensor([[3e4], [-3e4]])
    part.lse[:] = torch.tensor([[3e4 + 1], [-3e4]])
    want = ReferenceBackend().merge_partials([wide(total), wide(part)])
    merge_into(total, part)
    check(total, want)


def test_attention_over_three_sets_of_keys():
    """Partial results over disjoint keys merge to attention over all of them."""
    q = torch.randn(2, 4, 32)
    k, v = torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    want = attention_fp64(q, k, v, 0.2, first_position=30)
    parts = [
        attention_fp64(q, k[a:b], v[a:b], 0.2, first_position=30)
        for a, b in ((0, 7), (7, 8), (8, 30))
    ]
    total, *rest = [Partial(x.out.float().to(DEVICE), x.lse.float().to(DEVICE)) for x in parts]
    total = Partial(total.out.contiguous(), total.lse.contiguous())
    for part in rest:
        merge_into(total, Partial(part.out.contiguous(), part.lse.contiguous()))
    torch.testing.assert_close(total.out.double().cpu(), want.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.lse.double().cpu(), want.lse, rtol=1e-6, atol=1e-6)
