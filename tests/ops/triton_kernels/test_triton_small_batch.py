"""The fused norm, rounding and product (ops/triton_kernels/small_batch.py) has the bits of the
separate kernels."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.backend import NO_FUSION, Fusion, Norm
from ops.cuda import tune
from ops.cuda.linear import Int8Linear
from ops.cuda.tune import FUSED, TRITON, Choice
from ops.triton_kernels import small_batch
from ops.triton_kernels.linear import ScaledWeight, Tile, scaled_linear
from ops.triton_kernels.rows import quantize_rows
from ops.triton_kernels.small_batch import small_batch_linear
from tests.support.profile import every_day

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = Tile(8, 32, 64, 4, 3, swap=True)

pytestmark = pytest.mark.usefixtures("seeded")


def some_norm(kind: str, n: int) -> Norm:
    bias = torch.randn(n, device=DEVICE) if kind == "layer" else None
    return Norm(kind, 1 + 0.3 * torch.randn(n, device=DEVICE), bias, 1e-5)


def some_weight(outputs: int, inputs: int, *, has_bias: bool = True) -> ScaledWeight:
    codes, scales = quantize_rows(torch.randn(outputs, inputs, device=DEVICE))
    return ScaledWeight(codes, scales, torch.randn(outputs, device=DEVICE) if has_bias else None)


def both(
    x: torch.Tensor, fusion: Fusion, weight: ScaledWeight, *, adds: bool = False, tile: Tile = TILE
) -> list[torch.Tensor]:
    """Returns the results of the separate kernels and of the fused one, with the residual in
    place."""
    num_out = len(weight.codes) // (2 if fusion.is_gated else 1)
    residual = torch.randn(len(x), num_out, device=DEVICE) if adds else None
    outs = []
    for is_fused in (False, True):
        out = torch.full((len(x), num_out), float("nan"), device=DEVICE)
        if residual is not None:
            out = residual.clone()
        rest = weight, out, out if adds else None, fusion.activation
        if is_fused:
            small_batch_linear(x, fusion.norm, *rest, is_gated=fusion.is_gated, tile=tile)
        else:
            rows = quantize_rows(x, fusion.norm)
            scaled_linear(rows, *rest, is_gated=fusion.is_gated, tile=tile)
        outs.append(out)
    return outs


EDGES = {
    "plain": (NO_FUSION, True),
    "rms": (Fusion(some_norm("rms", 75)), False),
    "layer": (Fusion(some_norm("layer", 75)), True),
    "relu": (Fusion(None, "relu"), False),
    "gated": (Fusion(some_norm("rms", 75), "silu", True), False),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("fusion", "adds"), EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("rows", every_day((0, 2), [1, 2, 3, 4]))
def test_the_bits_of_separate_kernels(fusion, adds, rows):
    """The inputs are no multiple of 16 and fill two blocks, the outputs two tiles."""
    x = 10 * torch.randn(rows, 75, device=DEVICE)
    want, found = both(x, fusion, some_weight(38, 75), adds=adds)
    assert torch.equal(found, want) and found.isfinite().all()


@pytest.mark.parametrize("split", [1, 2, 3])
def test_parts_of_the_inputs(split):
    """Some of three parts are empty, and the scratch is left as it was."""
    weight = some_weight(20, 256, has_bias=False)
    x = torch.randn(2, 256, device=DEVICE)
    for _ in range(2):
        tile = TILE._replace(split_k=split)
        want, found = both(x, Fusion(some_norm("rms", 256)), weight, tile=tile)
        assert torch.equal(found, want)


@pytest.mark.parametrize("kind", ["rms", "layer", None])
def test_rows_longer_than_the_registers(kind):
    norm = None if kind is None else some_norm(kind, 1100)
    x = torch.randn(2, 1200, device=DEVICE).bfloat16()[:, 50:1150]
    tile = TILE._replace(num_warps=1, k=512, n=16)
    want, found = both(x, Fusion(norm), some_weight(20, 1100), tile=tile)
    assert torch.equal(found, want)


def test_zeros_nan_and_infinity():
    x = torch.randn(4, 50, device=DEVICE)
    x[0], x[1, 3], x[2, 7] = 0, float("nan"), float("inf")
    for norm in (None, some_norm("rms", 50)):
        want, found = both(x, Fusion(norm), some_weight(20, 50, has_bias=False))
        assert not found[0].any() and not found[1:3].isfinite().any()
        assert found[3].isfinite().all() and torch.equal(found[[0, 3]], want[[0, 3]])


def test_rows_that_overlap_the_results_are_refused():
    weight, wide = some_weight(32, 32), torch.randn(3, 64, device=DEVICE)
    x, out = wide[:2, :32], wide[1:, 31:63]
    with pytest.raises(AssertionError, match="others write"):
        small_batch_linear(x, None, weight, out, out, tile=TILE)
    assert small_batch._overlap(wide[0], wide[0, 63:])
    assert not small_batch._overlap(wide[0], wide[1]) and not small_batch._overlap(wide[1], wide[0])


def test_a_layer_uses_the_fused_kernel(monkeypatch):
    """The layer uses the fused kernel where it was measured to be the fastest."""
    layer = Int8Linear(torch.randn(36, 50), None, Fusion(some_norm("rms", 50)), device=DEVICE)
    x = torch.randn(3, 50, device=DEVICE)
    calls = []
    monkeypatch.setattr(
        "ops.cuda.linear.small_batch_linear",
        lambda *a, **k: calls.append(small_batch_linear(*a, **k)),
    )
    whole = layer(x)
    assert not calls and torch.equal(layer(x[:1]), whole[:1])
    layer._choices[1, False] = Choice(FUSED, TILE)
    assert torch.equal(layer(x[:1]), whole[:1]) and len(calls) == 1
    job = layer.job(3, adds=True)
    fused = [Choice(kind, TILE) for kind in (TRITON, FUSED)]
    assert torch.equal(*(job.run(choice) for choice in fused))
    assert FUSED in {c.implementation for c in tune.candidates(job.shape, 90)}
