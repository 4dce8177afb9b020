"""Products of the CUDA back end that are divided among ranks, with Triton's kernels interpreted."""

from __future__ import annotations

import functools

import pytest
import torch

from ops import get_backend
from ops.backend import Fusion, Norm, Routing
from ops.sharded import Columns, ShardedExperts, ShardedLinear
from serve.group.exchange.staged import StagedExchange
from tests.support.cuda.interpreted_ranks import one_launch_at_a_time  # noqa: F401
from tests.support.group.thread_ranks import on_ranks
from tests.support.profile import every_day

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("one_launch_at_a_time", "seeded"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels must be interpreted"),
]
IN, OUT, ROWS = 64, 96, 3
BOUNDS = [0, 32, OUT]
EXACT = ("int8", "int4", "nf4")
DTYPES = [*EXACT, "fp8", "bfloat16", "float32"]


def packer(backend, dtype: str):
    """Returns what packs a weight [out, in] in fp32."""
    linears = backend.quantized
    if dtype in ("bfloat16", "float32"):
        kind = getattr(torch, dtype)
        return lambda weight, fusion: backend.pack_linear(weight.to(kind), None, fusion)
    if dtype in ("int8", "fp8"):
        make = getattr(linears, dtype)
    else:
        make = functools.partial(
            linears.rounded4, group=32, is_nf4=dtype == "nf4", is_searched=dtype == "int4"
        )
    return lambda weight, fusion: make([weight], None, fusion)


def check(found: torch.Tensor, whole: torch.Tensor, dtype: str) -> None:
    """Sums of integers do not depend on tiles, others may in their last bits."""
    assert found.dtype == whole.dtype
    if dtype in EXACT:
        assert torch.equal(found, whole)
    else:
        torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linears(dtype, adds):
    backend = get_backend("cuda")
    pack = packer(backend, dtype)
    weight, x = torch.randn(OUT, IN), torch.randn(ROWS, IN)
    fusion = Fusion(Norm("rms", torch.rand(IN) + 0.5, None, 1e-6))
    kind = torch.float32 if dtype not in ("bfloat16",) else torch.bfloat16
    residual = torch.randn(ROWS, OUT).to(kind) if adds else None

    def copied() -> torch.Tensor | None:
        return None if residual is None else residual.clone()

    whole = pack(weight, fusion)(x, copied())

    def work(exchange):
        columns = Columns(StagedExchange(exchange, backend.device), BOUNDS)
        op = ShardedLinear(pack(weight[columns.own], fusion), columns)
        return op(x, copied())

    for found in on_ranks(2, work):
        check(found, whole, dtype)


@pytest.mark.parametrize(
    ("dtype", "scales_input"),
    every_day(
        [0, 1], [("int8", False), ("int4", True), *((x, False) for x in DTYPES if x not in EXACT)]
    ),
)
def test_experts(dtype, scales_input):
    backend, size = get_backend("cuda"), 64
    pack = packer(backend, dtype)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    x = torch.randn(ROWS, IN).to(kind)
    routing = Routing(
        torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32), torch.rand(ROWS, 2)
    )
    gates, ups = torch.randn(3, size, IN) / 8, torch.randn(3, size, IN) / 8
    downs = torch.randn(3, OUT, size) / 8
    gated = Fusion(None, "silu", True)

    def experts(between: slice, outputs: slice):
        packed_ups = [
            pack(torch.cat([gate[between], up[between]]), gated)
            for gate, up in zip(gates, ups, strict=True)
        ]
        packed_downs = [pack(down[outputs], Fusion()) for down in downs]
        return backend.pack_experts(packed_ups, packed_downs, scales_input=scales_input)

    every = slice(None)
    residual = torch.randn(ROWS, OUT).to(kind)
    whole = experts(every, every)
    expected = whole(x, routing), whole(x, routing, residual.clone())

    def work(exchange):
        staged = StagedExchange(exchange, backend.device)
        between, outputs = Columns(staged, [0, 32, size]), Columns(staged, BOUNDS)
        op = ShardedExperts(experts(between.own, outputs.own), between, outputs)
        return op(x, routing), op(x, routing, residual.clone())

    for found in on_ranks(2, work):
        for mine, other in zip(found, expected, strict=True):
            check(mine, other, dtype)
