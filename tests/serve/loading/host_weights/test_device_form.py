"""Products packed for the CPU, put in the form of a device: the bytes that the device packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ops.backend import NO_FUSION, Fusion
from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_stored import stored
from ops.cuda.backend import CudaBackend
from serve.loading.host_weights.device_form import ProductForm, SlotProducts
from serve.loading.host_weights.expert_memory import buffers_in, copy_buffers

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("seeded"),
]

GATED = Fusion(None, "silu", True)
KINDS = ["int8", "int4", "nf4", "zeros", "minimums", "float32", "bfloat16"]


@pytest.fixture(scope="module")
def backends() -> tuple[CpuBackend, CudaBackend]:
    return CpuBackend(), CudaBackend()


def packings(kind: str, weight: Tensor, bias: Tensor | None, fusion: Fusion, group: int) -> Any:
    """Returns what packs the same product on a back end."""
    if kind in ("float32", "bfloat16"):
        dtype = getattr(torch, kind)
        last = None if bias is None else bias.to(dtype)
        return lambda backend: backend.pack_linear(weight.to(dtype), last, fusion)
    if kind == "int8":
        return lambda backend: backend.quantized.int8([weight], bias, fusion)
    if kind in ("int4", "nf4"):
        how = {"group": group, "is_nf4": kind == "nf4"}
        return lambda backend: backend.quantized.rounded4([weight], bias, fusion, **how)
    shape = (len(weight), -(-weight.shape[1] // group))
    scales, codes = torch.rand(shape) * 0.02, torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    zeros = torch.randint(0, 17, shape, dtype=torch.uint8) if kind == "zeros" else None
    lows = torch.rand(shape) * 0.1 if kind == "minimums" else None
    return lambda backend: backend.quantized.int4(
        codes, scales, zeros, bias, fusion, group=group, minimums=lows
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fusion", [NO_FUSION, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("rows", "num_in", "group", "has_bias"),
    [
        (64, 128, 32, False),
        (64, 128, 128, True),
        (74, 90, 16, True),
        pytest.param(18, 33, 64, False, marks=pytest.mark.exhaustive),
    ],
)
def test_every_slot_has_the_bytes_that_the_device_packs(
    backends, kind, fusion, rows, num_in, group, has_bias
):
    cpu, device = backends
    packs = []
    for _ in range(3):
        weight = torch.randn(rows, num_in) / 8
        bias = torch.randn(rows) if has_bias else None
        packs.append(packings(kind, weight, bias, fusion, group))
    host, want = [pack(cpu) for pack in packs], [pack(device) for pack in packs]
    found = [stored(op) for op in host]
    assert found[0] is not None
    layout, buffers = found[0]
    form = ProductForm(layout, tuple(each.num_bytes for each in buffers), fusion, want[0])
    assert form.is_known
    raw = torch.zeros(3, form.host_bytes, dtype=torch.uint8)
    for row, op in zip(raw, host, strict=True):
        copy_buffers(op, buffers_in(form, row))
    slots = SlotProducts(form, 4)
    slots.fill(1, raw[:2])
    slots.fill(3, raw[2:])
    for op, slot in zip(want, slots.ops[1:], strict=True):
        if kind in ("float32", "bfloat16"):
            same(slot.weight, op.weight)
            same(slot.bias, op.bias)
            continue
        first, words, *rest = zip(slot.weight, op.weight, strict=True)
        same(*first)
        for one, other in rest:
            same(one, other)
        if kind == "int8":
            same(*words)
        else:  # those of groups and outputs that there are
            groups = -(-num_in // group)
            same(*(each[:groups, :rows] for each in words))


def same(one: Any, other: Any) -> None:
    assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_multiplies_as_the_device_does(backends, kind):
    """Also where outputs and inputs are no multiples of panels and chunks."""
    cpu, device = backends
    pack = packings(kind, torch.randn(74, 90) / 8, torch.randn(74), GATED, 32)
    host, want = pack(cpu), pack(device)
    found = stored(host)
    assert found is not None
    sizes = tuple(each.num_bytes for each in found[1])
    form = ProductForm(found[0], sizes, GATED, want)
    raw = torch.zeros(1, form.host_bytes, dtype=torch.uint8)
    copy_buffers(host, buffers_in(form, raw[0]))
    slots = SlotProducts(form, 1)
    slots.fill(0, raw)
    x = torch.randn(2, 90, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    assert torch.equal(slots.ops[0](x), want(x))


def test_unlike_forms_are_not_known(backends):
    cpu, device = backends
    weight = torch.randn(64, 128)
    found = stored(cpu.quantized.int8([weight], None, NO_FUSION))
    assert found is not None
    sizes = tuple(each.num_bytes for each in found[1])
    others = [
        device.quantized.rounded4([weight], None, group=64, is_nf4=False),
        device.pack_linear(weight),
        device.quantized.fp8([weight], None, NO_FUSION),
    ]
    assert not any(ProductForm(found[0], sizes, NO_FUSION, other).is_known for other in others)
