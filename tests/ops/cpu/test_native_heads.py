"""The joined products of heads, on every instruction set of this machine.

They have the bits of the same layers called one by one; these are compared with float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.backend import Fusion, LinearOp, Norm
from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_heads import NativeHeads, can_join
from ops.cpu.native_quantized_linear import NATIVE
from ops.heads import HeadsOneByOne
from ops.reference import ReferenceBackend

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
WEIGHTS = ["int8", "int4", "nf4", "bf16", "fp32"]


def packed(weight: Tensor, kind: str, bias: Tensor | None = None) -> LinearOp:
    if kind == "int8":
        return NATIVE.int8([weight], bias)
    if kind in ("int4", "nf4"):
        return NATIVE.rounded4([weight], bias, group=32, is_nf4=kind == "nf4")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return CpuBackend().pack_linear(weight.to(dtype), None if bias is None else bias.to(dtype))


def random_heads(kind: str, heads: int, num_in: int, num_out: int) -> list[LinearOp]:
    weights = torch.randn(heads, num_out, num_in) / num_in**0.5
    return [packed(weight, kind, torch.randn(num_out)) for weight in weights]


def random_rows(kind: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16 if kind == "bf16" else torch.float32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(
    ("heads", "num_in", "num_out"), [(16, 128, 512), (3, 100, 70), (5, 33, 1), (2, 544, 200)]
)
def test_joined_and_single_calls_have_the_same_bits(isa, kind, heads, num_in, num_out):
    ops = random_heads(kind, heads, num_in, num_out)
    joined, single = NativeHeads(ops), HeadsOneByOne(ops)
    for rows in (1, 2, 7, 40, 300):
        x = random_rows(kind, rows, heads, num_in)
        found = joined(x)
        assert found.shape == (rows, heads, num_out) and torch.equal(found, single(x))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_in_more_than_one_pass(kind):
    ops = random_heads(kind, 7, 64, 40)
    for rows in (1500, 9000):
        x = random_rows(kind, rows, 7, 64)
        assert torch.equal(NativeHeads(ops)(x), HeadsOneByOne(ops)(x))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_does_not_depend_on_the_batch(isa, kind):
    joined = NativeHeads(random_heads(kind, 6, 96, 80))
    x = random_rows(kind, 150, 6, 96)
    whole = joined(x)
    for first, end in ((0, 1), (17, 18), (3, 16), (20, 150)):
        assert torch.equal(joined(x[first:end]), whole[first:end])


def test_no_rows(isa):
    joined = NativeHeads(random_heads("int8", 3, 64, 40))
    assert joined(torch.empty(0, 3, 64)).shape == (0, 3, 40)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_strided_rows(isa, kind):
    """A part of each head, as of queries without positions, and inputs that are not dense."""
    joined = NativeHeads(random_heads(kind, 4, 48, 64))
    whole = random_rows(kind, 9, 4, 80)
    for x in (whole[..., :48], whole[..., 32:], random_rows(kind, 48, 9, 4).permute(1, 2, 0)):
        assert torch.equal(joined(x), joined(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_against_float64(isa, kind):
    weights, x = torch.randn(8, 60, 64) / 8, random_rows(kind, 30, 8, 64)
    ops = [packed(weight, kind) for weight in weights]
    exact = REFERENCE.pack_heads([REFERENCE.pack_linear(w.double()) for w in weights])(x.double())
    found = CpuBackend().pack_heads(ops)(x)
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < {"int8": 0.02, "int4": 0.2, "nf4": 0.2, "bf16": 0.01, "fp32": 1e-6}[kind]


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_nan_stays_in_its_row_and_head(isa, kind):
    joined = NativeHeads(random_heads(kind, 3, 64, 40))
    x = random_rows(kind, 5, 3, 64)
    expected = joined(x)
    x[2, 1, 5] = torch.nan
    found = joined(x)
    assert bool(found[2, 1].isnan().all())
    expected[2, 1] = found[2, 1] = 0
    assert torch.equal(found, expected)


def test_layers_that_cannot_be_joined():
    weight = torch.randn(40, 64)
    int8, plain = packed(weight, "int8"), packed(weight, "fp32")
    normed = NATIVE.int8([weight], None, Fusion(Norm("rms", torch.ones(64), None, 1e-6)))
    slow = REFERENCE.pack_linear(weight)
    for ops in ([int8, plain], [plain, packed(weight, "bf16")], [int8, normed], [int8, slow]):
        assert not can_join(ops)
        assert isinstance(CpuBackend().pack_heads(ops), HeadsOneByOne)
    assert isinstance(CpuBackend().pack_heads([int8, int8]), NativeHeads)
    with pytest.raises(ValueError, match="not of one shape"):
        CpuBackend().pack_heads([int8, packed(weight[:39], "int8")])
