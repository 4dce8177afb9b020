"""Native layers made over the bytes of packed ones have the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ops.backend import Fusion, LinearOp, Norm, Routing
from ops.cpu import native_experts, native_library
from ops.cpu.native_plain_linear import PlainLinear
from ops.cpu.native_quantized_linear import NATIVE
from ops.cpu.native_stored import LayerKind, restore, stored
from ops.linear import PlainLinear as Unfused
from ops.reference import ReferenceBackend
from tests.support.gguf.superblocks import random_superblocks

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="the native kernels are not built"
)
IN, OUT, GROUP = 96, 40, 32
GATED = Fusion(Norm("rms", torch.rand(IN) + 0.5, None, 1e-6), "silu", is_gated=True)
DENSE = Fusion(None, "gelu")
WIDE = GATED._replace(norm=Norm("rms", torch.rand(512) + 0.5, None, 1e-6))


def copies(op: LinearOp) -> tuple[LayerKind, list[Tensor]]:
    """Returns a layer's kind and copies of its buffers."""
    found = stored(op)
    assert found is not None
    kind, buffers = found
    made = []
    for address, num_bytes in buffers:
        whole = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        copy = whole[-whole.data_ptr() % 64 :][:num_bytes]
        copy.copy_(
            torch.frombuffer(
                bytearray(ctypes.string_at(address, num_bytes) or b"-"), dtype=torch.uint8
            )[:num_bytes]
        )
        made.append(copy)
    return kind, made


def weight(rows: int) -> Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows))


def four_bits(fusion: Fusion, **settings: object) -> LinearOp:
    rows = OUT * (2 if fusion.is_gated else 1)
    codes = torch.randint(0, 16, (rows, IN), dtype=torch.uint8)
    shape = rows, IN // GROUP
    extra = {
        "zeros": torch.randint(0, 16, shape) if settings.get("zeros") else None,
        "minimums": torch.rand(shape) if settings.get("minimums") else None,
    }
    table = str(settings.get("table", "int4"))
    scales = torch.ldexp(torch.ones(shape), torch.randint(-3, 3, shape))
    return NATIVE.int4(codes, scales, bias=None, fusion=fusion, group=GROUP, table=table, **extra)


def superblocks(kind: str, fusion: Fusion) -> LinearOp:
    rows = OUT * (2 if fusion.is_gated else 1)
    return NATIVE.superblocks(random_superblocks(kind, rows, 512), torch.randn(rows), fusion)


LAYERS: dict[str, Callable[[], tuple[LinearOp, Fusion]]] = {
    "int8": lambda: (NATIVE.int8([weight(2 * OUT)], torch.randn(2 * OUT), GATED), GATED),
    "int8 without bias": lambda: (NATIVE.int8([weight(OUT)], None, DENSE), DENSE),
    "rounded4": lambda: (
        NATIVE.rounded4([weight(OUT)], torch.randn(OUT), DENSE, group=64, is_nf4=True),
        DENSE,
    ),
    "int4": lambda: (four_bits(GATED), GATED),
    "zeros": lambda: (four_bits(DENSE, zeros=True), DENSE),
    "minimums": lambda: (four_bits(DENSE, minimums=True), DENSE),
    "fp4": lambda: (four_bits(DENSE, table="fp4"), DENSE),
    "q4_k": lambda: (superblocks("q4_k", WIDE), WIDE),
    "q6_k": lambda: (superblocks("q6_k", DENSE), DENSE),
    "iq4": lambda: (four_bits(DENSE, table="iq4"), DENSE),
    "iq4_xs": lambda: (superblocks("iq4_xs", WIDE), WIDE),
    "bf16": lambda: (PlainLinear(weight(2 * OUT).bfloat16(), torch.ones(2 * OUT), GATED), GATED),
    "fp32": lambda: (PlainLinear(weight(OUT), None, DENSE), DENSE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_restored_layer_has_the_bits(name: str) -> None:
    op, fusion = LAYERS[name]()
    kind, buffers = copies(op)
    found = restore(kind, buffers, fusion)
    x = torch.randn(5, kind.num_in).to(getattr(op, "dtype", torch.float32))
    assert torch.equal(op(x), found(x))
    again = stored(found)
    assert again is not None and again[0] == kind
    assert [part.address for part in again[1]] == [part.data_ptr() for part in buffers]


def test_the_layer_keeps_its_memory() -> None:
    """Its buffers may be the last references to a mapped file."""
    op, fusion = LAYERS["int8"]()
    kind, buffers = copies(op)
    found, x = restore(kind, buffers, fusion), torch.randn(3, IN)
    before = found(x)
    del buffers
    [torch.full((1 << 12,), 7, dtype=torch.uint8) for _ in range(64)]
    assert torch.equal(found(x), before) and torch.equal(before, op(x))


def test_experts_take_restored_layers() -> None:
    up_fusion, down_fusion = Fusion(None, "silu", is_gated=True), Fusion()
    ups = [NATIVE.int8([weight(2 * IN)], None, up_fusion) for _ in range(3)]
    downs = [NATIVE.int8([weight(IN)], None, down_fusion) for _ in range(3)]
    again = [
        [restore(*copies(op), fusion) for op in ops]
        for ops, fusion in ((ups, up_fusion), (downs, down_fusion))
    ]
    assert native_experts.can_group(*again)
    x, experts = torch.randn(4, IN), torch.tensor([[0, 2]] * 4, dtype=torch.int32)
    routing = Routing(experts, torch.full((4, 2), 0.5))
    want = native_experts.NativeExperts(ups, downs, False)(x, routing)
    assert torch.equal(native_experts.NativeExperts(*again, False)(x, routing), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda kind, parts: (kind._replace(num_out=kind.num_out + 32), parts),
        lambda kind, parts: (kind._replace(num_in=kind.num_in + 64), parts),
        lambda kind, parts: (kind._replace(num_in=-kind.num_in), parts),
        lambda kind, parts: (kind._replace(num_in=1 << 40), parts),
        lambda kind, parts: (kind._replace(name="int5"), parts),
        lambda kind, parts: (kind._replace(name="int4", group=0), parts),
        lambda kind, parts: (kind._replace(name="q6_k"), parts),
        lambda kind, parts: (kind._replace(name="q6_k", num_in=256), parts),
        lambda kind, parts: (kind._replace(name="int4", group=32, codes=9), parts),
        lambda kind, parts: (kind, [parts[0][:-64], *parts[1:]]),
        lambda kind, parts: (kind, [parts[0], parts[1][:0], parts[2]]),
        lambda kind, parts: (kind, [parts[0], parts[1], parts[2][:-4]]),
        lambda kind, parts: (kind, [torch.cat([parts[0], parts[0]])[4:][: len(parts[0])],
                                    *parts[1:]]),
        lambda kind, parts: (kind, parts[:2]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    change: Callable[..., tuple[LayerKind, list[Tensor]]],
) -> None:
    op, fusion = LAYERS["int8"]()
    with pytest.raises(ValueError, match="stored"):
        restore(*change(*copies(op)), fusion)


def test_other_layers_are_not_stored() -> None:
    assert stored(Unfused(ReferenceBackend(), lambda x: x, Fusion())) is None
