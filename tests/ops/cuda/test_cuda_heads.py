"""The products of heads in one launch: the bits of their layers called one by one."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.cuda.backend import CudaBackend
from ops.cuda.heads import CudaHeads
from ops.heads import HeadsOneByOne

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("seeded")


def packed(backend: CudaBackend, kind: str, num_heads: int, num_out: int, num_in: int):
    ops = []
    for _ in range(num_heads):
        weight = torch.randn(num_out, num_in) / num_in**0.5
        if kind == "int8":
            ops.append(backend.quantized.int8([weight], None))
        elif kind == "int4":
            ops.append(backend.quantized.rounded4([weight], None, group=64, is_nf4=False))
        else:
            ops.append(backend.pack_linear(weight.to(getattr(torch, kind))))
    return ops


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16", "float32"])
def test_heads_equal_their_layers(kind):
    backend = CudaBackend()
    ops = packed(backend, kind, 3, 20, 48)
    heads, single = backend.pack_heads(ops), HeadsOneByOne(ops)
    assert isinstance(heads, CudaHeads)
    assert heads.size_bytes == sum(op.size_bytes for op in ops)
    wide = torch.randn(5, 3, 60, device=DEVICE)
    if kind == "bfloat16":
        wide = wide.bfloat16()
    x = wide[..., :48]
    found, expected = heads(x), single(x)
    assert found.dtype == expected.dtype and found.shape == (5, 3, 20)
    if kind in ("int8", "int4"):
        assert torch.equal(found, expected)
    else:
        rtol = 1e-5 if kind == "float32" else 2**-6
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    for rows in (slice(0, 1), slice(2, 5)):
        assert torch.equal(heads(x[rows]), found[rows])
    assert heads(x[:0]).shape == (0, 3, 20)


def test_heads_of_several_kinds_run_one_by_one():
    backend = CudaBackend()
    ops = [*packed(backend, "int8", 1, 20, 48), *packed(backend, "float32", 1, 20, 48)]
    assert isinstance(backend.pack_heads(ops), HeadsOneByOne)
    ops = [*packed(backend, "int8", 1, 20, 48), *packed(backend, "int8", 1, 16, 48)]
    with pytest.raises(ValueError, match="not of one shape"):
        backend.pack_heads(ops)
