"""int8 products on CUDA (ops/triton_kernels/linear.py, ops/cuda/linear.py), against fp64."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as functional

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.backend import NO_FUSION, Fusion, Norm
from ops.cuda import tune
from ops.cuda.linear import Int8Linear, round_weight
from ops.reference import _activate, gate
from ops.triton_kernels.linear import ScaledWeight, Tile, library_linear, scaled_linear
from ops.triton_kernels.rows import Quantized, quantize_rows
from tests.support.profile import every_day

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = {
    "rows first": Tile(16, 32, 64, 4, 3),
    "swapped": Tile(16, 16, 32, 4, 3, swap=True),
    "8 rows": Tile(8, 32, 32, 4, 3, swap=True),
    "split": Tile(32, 16, 32, 4, 3, split_k=3),
    "wide": Tile(64, 256, 32, 4, 3),
    "swapped and split": Tile(8, 16, 32, 2, 3, swap=True, split_k=2),
}
# rows, outputs, inputs: one, odd ones, several tiles each way
SIZES = ((1, 1, 5), (3, 17, 33), (37, 70, 160))

pytestmark = pytest.mark.usefixtures("seeded")


def some_norm(kind: str, n: int) -> Norm:
    bias = torch.randn(n, device=DEVICE) if kind == "layer" else None
    return Norm(kind, 1 + 0.3 * torch.randn(n, device=DEVICE), bias, 1e-5)


def random_codes(rows: int, inputs: int) -> Quantized:
    """Returns random codes, padded with zeros to a multiple of 16 inputs."""
    codes = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    codes = functional.pad(codes, (0, -inputs % 16)).to(DEVICE)
    return Quantized(codes, torch.rand(rows, device=DEVICE) + 0.5)


def exact(x: Quantized, weight: ScaledWeight) -> torch.Tensor:
    """Returns the product with the bias: [M, N] fp64."""
    y = (x.codes.double() @ weight.codes.double().T) * x.scales.double()[:, None]
    y *= weight.scales.double()
    return y if weight.bias is None else y + weight.bias.double()


def check_close(found: torch.Tensor, want: torch.Tensor) -> None:
    """want: fp64. bf16 may be off by one step, since the interpreter truncates."""
    rtol = 2**-7 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), want, rtol=rtol, atol=1e-5 * want.abs().max().item())


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_sums_are_exact(tile, rows, outputs, inputs):
    x, w = random_codes(rows, inputs), random_codes(outputs, inputs)
    ones = torch.ones(outputs, device=DEVICE)
    out = torch.full((rows, outputs), float("nan"), device=DEVICE)
    scaled_linear(
        Quantized(x.codes, torch.ones(rows, device=DEVICE)),
        ScaledWeight(w.codes, ones),
        out,
        tile=tile,
    )
    assert torch.equal(out.double(), x.codes.double() @ w.codes.double().T)


KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai")
# The wide tile differs from the first only in its size, which takes long.
ACTIVATED = [(name, KINDS) for name in TILES if name != "wide"]
ACTIVATED += [("wide", ("silu", "swiglu_oai")), ("wide", KINDS[1:5])]


@pytest.mark.parametrize(("name", "kinds"), every_day(range(len(TILES)), ACTIVATED))
def test_scales_bias_activation_and_residual(name, kinds):
    tile = TILES[name]
    rows, outputs, inputs = 19, 38, 96
    x, w = random_codes(rows, inputs), random_codes(outputs, inputs)
    w = ScaledWeight(w.codes, w.scales * 1e-4, torch.randn(outputs, device=DEVICE))
    want = exact(x, w)
    residual = torch.randn(rows, outputs, device=DEVICE)
    total = want + residual.double()
    found = scaled_linear(x, w, residual, residual, tile=tile)
    check_close(found, total)
    for kind in kinds:
        if kind != "swiglu_oai":
            out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
            check_close(scaled_linear(x, w, out, None, kind, tile=tile), _activate(want, kind))
        out = torch.empty(rows, outputs // 2, device=DEVICE)
        gated = gate(want[:, 0::2], want[:, 1::2], kind)
        check_close(scaled_linear(x, w, out, None, kind, is_gated=True, tile=tile), gated)


def test_no_tile_changes_a_bit():
    """The library's product and a reused scratch give the same bits, too."""
    x, w = random_codes(24, 160), random_codes(48, 160)
    w = ScaledWeight(w.codes, w.scales * 1e-4, torch.randn(48, device=DEVICE))
    for is_gated in (False, True):
        found = []
        for tile in (*TILES.values(), None, TILES["split"]):
            out = torch.empty(24, 24 if is_gated else 48, dtype=torch.bfloat16, device=DEVICE)
            if tile is None:
                library_linear(x, w, out, None, "silu", is_gated=is_gated)
            else:
                scaled_linear(x, w, out, None, "silu", is_gated=is_gated, tile=tile)
            found.append(out)
        assert all(torch.equal(found[0], other) for other in found[1:])


EDGES = {
    "plain": NO_FUSION,
    "rms": Fusion(some_norm("rms", 50)),
    "layer": Fusion(some_norm("layer", 50)),
    "relu": Fusion(None, "relu"),
    "gated": Fusion(some_norm("rms", 50), "silu", True),
}


def layer_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fusion: Fusion
) -> torch.Tensor:
    """Computes in fp64, with weights and rows rounded as the layer rounds them."""
    rows, w = quantize_rows(x, fusion.norm), quantize_rows(weight.float())
    y = exact(rows, ScaledWeight(w.codes, w.scales, bias))
    if fusion.is_gated:
        gate, up = y.chunk(2, 1)
        return _activate(gate, fusion.activation) * up
    return y if fusion.activation is None else _activate(y, fusion.activation)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fusion", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("rows", [1, 5, 20, 70])
def test_layer(fusion, rows):
    weight, bias = torch.randn(36, 50), torch.randn(36, device=DEVICE)
    x = torch.randn(rows, 50, device=DEVICE)
    layer = Int8Linear(weight, bias, fusion, device=DEVICE)
    want = layer_reference(x, weight.to(DEVICE), bias, fusion)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    check_close(found, want)
    check_close(Int8Linear(weight, bias, fusion, is_head=True, device=DEVICE)(x), want)
    if not fusion.is_gated:
        residual = torch.randn(rows, 36, device=DEVICE)
        total = want + residual.double()
        check_close(layer(x, residual), total)


def test_parts_pieces_and_given_codes(monkeypatch):
    """The packed weight is the same whether the layer's weight comes whole, in pieces or as
    codes."""
    weight, bias = torch.randn(34, 48, dtype=torch.bfloat16), torch.randn(34)
    for fusion in (NO_FUSION, Fusion(None, "silu", True)):
        whole = Int8Linear(weight, bias, fusion, device=DEVICE).weight
        with monkeypatch.context() as patched:
            patched.setattr("ops.cuda.linear.PACK_VALUES", 5 * 48)
            parts = Int8Linear([weight[:10], weight[10:]], bias, fusion, device=DEVICE).weight
        codes, scales = round_weight(weight, torch.int8)
        given = Int8Linear([codes], bias, fusion, scales=scales, device=DEVICE).weight
        for other in (parts, given):
            assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
        order = [j + half for j in range(17) for half in (0, 17)] if fusion.is_gated else range(34)
        assert torch.equal(whole.codes.cpu(), codes[list(order)])


def test_a_row_is_the_same_in_any_batch():
    layer = Int8Linear(torch.randn(40, 64), None, EDGES["relu"], device=DEVICE)
    x = torch.randn(70, 64, device=DEVICE)
    whole = layer(x)
    for some in (slice(0, 1), slice(3, 7), slice(10, 30), slice(5, 69)):
        assert torch.equal(layer(x[some]), whole[some])


def test_strided_rows_no_rows_and_a_wide_residual():
    layer = Int8Linear(torch.randn(20, 32), None, device=DEVICE)
    wide = torch.randn(6, 100, device=DEVICE)
    assert torch.equal(layer(wide[:, 40:72]), layer(wide[:, 40:72].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 20)
    residual = torch.randn(6, 50, device=DEVICE)
    before = residual.clone()
    want = layer(wide[:, :32], before[:, 10:30].clone())
    assert torch.equal(layer(wide[:, :32], residual[:, 10:30]), want)
    assert torch.equal(residual[:, 30:], before[:, 30:])


def test_zeros_nan_and_infinity():
    weight = torch.randn(20, 32)
    weight[3] = 0
    layer = Int8Linear(weight, None, device=DEVICE)
    x = torch.randn(5, 32, device=DEVICE)
    x[1], x[2, 5], x[3, 7] = 0, float("nan"), float("inf")
    found = layer(x)
    assert not found[1].any() and not found[[0, 4], 3].any()
    assert found[[0, 1, 4]].isfinite().all() and not found[2:4].isfinite().any()
    assert torch.equal(found[4:], layer(x[4:]))


def test_too_many_inputs_are_refused():
    with pytest.raises(ValueError, match="at most 132,104"):
        Int8Linear(torch.zeros(1, 132_105), None, device=DEVICE)


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_candidate_gives_the_same(capability):
    """Small products take every path of the candidates; large ones are too slow to interpret."""
    x, w = random_codes(64, 1100), random_codes(48, 1100)
    w = ScaledWeight(w.codes, w.scales)
    for rows in (4, 16, 32, 64):
        some = Quantized(x.codes[:rows], x.scales[:rows])
        shape = tune.Shape("int8", rows, 48, w.codes.shape[1])
        tiles = [c.tile for c in tune.candidates(shape, capability)]
        outs = [scaled_linear(some, w, torch.empty(rows, 48, device=DEVICE), tile=t) for t in tiles]
        check_close(outs[0], exact(some, w))
        assert all(torch.equal(outs[0], other) for other in outs)
