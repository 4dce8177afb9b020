"""Routers and experts that run one after the other, against loops in float64."""

from __future__ import annotations

import pytest
import torch

from ops.backend import Fusion, Router, RouterKind
from ops.cpu.backend import CpuBackend
from ops.reference import ReferenceBackend

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("scales_input", [False, True])
def test_the_cpu_mixes_experts_as_the_reference_does(scales_input):
    ups, downs = torch.randn(6, 40, 24) / 5, torch.randn(6, 24, 20) / 5
    x, residual = torch.randn(9, 24), torch.randn(9, 24)
    router = Router(RouterKind(top_k=3, is_normalized=True), torch.randn(6, 24))

    def mixed(backend, dtype):
        fusion = Fusion(None, "silu", True)
        experts = backend.pack_experts(
            [backend.pack_linear(w.to(dtype), None, fusion) for w in ups],
            [backend.pack_linear(w.to(dtype)) for w in downs],
            scales_input=scales_input,
        )
        return experts(x.to(dtype), backend.route(x, router), residual.to(dtype).clone())

    expected = mixed(ReferenceBackend(), torch.float64)
    found = mixed(CpuBackend(), torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
