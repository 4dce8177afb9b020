"""Layers of a few small experts in host memory beside the same on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ops.backend import NO_FUSION, Fusion, LinearOp, Routing
from ops.cpu.backend import CpuBackend
from ops.cpu.native_stored import stored
from ops.cuda.backend import CudaBackend
from ops.cuda.experts import CudaExperts
from serve.loading.host_weights.device_experts import DeviceExperts, LayerOnDevice
from serve.loading.host_weights.device_form import ProductForm
from serve.loading.host_weights.expert_memory import ExpertMemory
from serve.loading.host_weights.experts import HostExperts, HostRows
from serve.loading.host_weights.link import Link

SIZE, INNER, EXPERTS = 32, 16, 5
GATED = Fusion(None, "silu", True)


class SmallLayer(NamedTuple):
    """host: what the CPU computes; device: the same experts, all on the device."""

    host: HostExperts
    device: CudaExperts


def pack_int8(backend: CpuBackend | CudaBackend, *args: object) -> LinearOp:
    weight, bias, fusion = args
    assert backend.quantized is not None
    return backend.quantized.int8([weight], bias, fusion)  # type: ignore[list-item, arg-type]


def pack_plain(backend: CpuBackend | CudaBackend, *args: object) -> LinearOp:
    return backend.pack_linear(*args)  # type: ignore[arg-type]


def small_layers(
    count: int,
    link: Link,
    pack: Callable[..., LinearOp] = pack_plain,
    constants: list[float] | None = None,
    *,
    scales_input: bool = False,
) -> list[SmallLayer]:
    """Returns layers of one form with weights of their own. constants: what each expert gives for
    every row, instead of random weights."""
    cpu, device = CpuBackend(), CudaBackend()
    forms: list[ProductForm] = []
    rows = HostRows(link)
    made = []
    for _ in range(count):
        both: tuple[list[list[LinearOp]], list[list[LinearOp]]] = ([[], []], [[], []])
        for expert in range(EXPERTS):
            up, down = torch.randn(2 * INNER, SIZE) / 6, torch.randn(SIZE, INNER) / 4
            bias = torch.randn(SIZE)
            if constants is not None:
                down, bias = torch.zeros_like(down), torch.full((SIZE,), constants[expert])
            for side, args in enumerate(((up, None, GATED), (down, bias, NO_FUSION))):
                for backend, ops in zip((cpu, device), both, strict=True):
                    ops[side].append(pack(backend, *args))
        if not forms:
            for side, fusion in enumerate((GATED, NO_FUSION)):
                found = stored(both[0][side][0])
                assert found is not None
                sizes = tuple(each.num_bytes for each in found[1])
                forms = [*forms, ProductForm(found[0], sizes, fusion, both[1][side][0])]
        memory = ExpertMemory(forms[0], forms[1], *both[0], link, scales_input=scales_input)
        op = cpu.pack_experts(memory.ups, memory.downs, scales_input=scales_input)
        host = HostExperts(op, EXPERTS, rows, scales_input=scales_input)
        host.memory = memory
        made.append(SmallLayer(host, CudaExperts(*both[1], scales_input)))
    return made


def memories(layers: list[SmallLayer]) -> list[ExpertMemory]:
    found = [each.host.memory for each in layers]
    return [each for each in found if each is not None]


def join(layers: list[SmallLayer], shared: DeviceExperts) -> None:
    """Lets the device compute experts of the layers."""
    for number, each in enumerate(layers):
        each.host.on_device = LayerOnDevice(shared, number)


def routing_of(*experts: list[int]) -> Routing:
    """Returns the routing of rows that use these experts."""
    chosen = torch.tensor(experts, dtype=torch.int32)
    return Routing(chosen, torch.linspace(0.2, 0.9, chosen.numel()).view(chosen.shape))
