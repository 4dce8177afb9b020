"""Linear layers with weights in superblocks on every instruction set of this machine.

Rows of whole numbers up to 127 are not rounded, so that only the weights' own arithmetic is left.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops import Fusion, LinearOp, Norm
from ops.backend import Routing
from ops.cpu import native_library
from ops.cpu.native_experts import NativeExperts
from ops.cpu.native_fusion import ACTIVATIONS
from ops.cpu.native_heads import NativeHeads
from ops.cpu.native_quantized_linear import NATIVE
from ops.experts import ExpertsOneByOne
from ops.heads import HeadsOneByOne
from ops.reference import ReferenceBackend
from ops.superblocks import SUPERBLOCK_KINDS
from tests.support.gguf.superblocks import dequantized, magnitudes, random_superblocks
from tests.support.memory.native_rows import check_rows_alone

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
KINDS = tuple(SUPERBLOCK_KINDS)
SHAPES = [(1, 256, 32), (3, 768, 70), (5, 512, 1), (16, 1280, 96), (65, 1024, 300), (200, 256, 40)]
FUSED = [(kind, gated) for kind in ACTIVATIONS if kind for gated in (False, True)]
FUSED.remove(("swiglu_oai", False))  # it exists only with gates


def whole_rows(rows: int, size: int) -> Tensor:
    x = torch.randint(-127, 128, (rows, size)).float()
    x[:, 0] = 127.0
    return x


def error_bound(x: Tensor, size: Tensor, kind: str) -> Tensor:
    """Returns half a unit in the last place of fp32 for each sum of a group and of a superblock."""
    per_block = 256 // SUPERBLOCK_KINDS[kind].group + 3
    num_sums = size.shape[1] // 256 * per_block + 8
    return x.abs().double() @ size.T * num_sums * 2.0**-24


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_rounded(isa, m, k, n, kind):
    weight, x = random_superblocks(kind, n, k), whole_rows(m, k)
    wrong = (NATIVE.superblocks(weight, None)(x) - x.double() @ dequantized(weight).T).abs()
    assert bool((wrong <= error_bound(x, magnitudes(weight), kind)).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", range(16))
def test_each_input_has_its_weight(isa, kind, place):
    """Units of codes hold up to 16 inputs; one input at a time has a product of its own."""
    weight = random_superblocks(kind, 33, 512)
    x = torch.zeros(32, 512)
    x[torch.arange(32), torch.arange(32) * 16 + place] = 127.0
    wrong = (NATIVE.superblocks(weight, None)(x) - x.double() @ dequantized(weight).T).abs()
    assert bool((wrong <= error_bound(x, magnitudes(weight), kind)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_largest", [False, True])
@pytest.mark.parametrize("step", [-128, 127])
@pytest.mark.parametrize("lift", [0, 255])
def test_the_largest_sums_do_not_overflow(isa, kind, is_largest, step, lift):
    """Some kernels add several products in 16 bits."""
    weight = random_superblocks(kind, 40, 256)
    code = (1 << SUPERBLOCK_KINDS[kind].bits) - 1 if is_largest else 0
    weight.codes.fill_(code)
    weight.steps.fill_(step)
    if weight.lifts is not None:
        weight.lifts.fill_(lift)
    x = torch.tensor([127.0, -127.0])[:, None].expand(2, 256)
    wrong = (NATIVE.superblocks(weight, None)(x) - x.double() @ dequantized(weight).T).abs()
    assert bool((wrong <= error_bound(x, magnitudes(weight), kind)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_are_rounded(isa, kind, dtype):
    weight, x = random_superblocks(kind, 100, 768), torch.randn(7, 768).to(dtype)
    y, wide, x = NATIVE.superblocks(weight, None)(x), dequantized(weight), x.double()
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((y - x @ wide.T).abs() <= 0.51 * step * wide.abs().sum(1) + 1e-6).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(isa, kind):
    check_rows_alone(NATIVE.superblocks(random_superblocks(kind, 150, 768), torch.randn(150)), 768)


@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_with_fused_multiply_adds_have_the_same_bits(kind):
    weight, x = random_superblocks(kind, 70, 768), torch.randn(9, 768)
    layer, before = NATIVE.superblocks(weight, torch.randn(70)), native_library.instruction_set()
    results = []
    try:
        for isa in native_library.library().instruction_sets():
            if isa != "portable":
                assert native_library.library().choose_instruction_set(isa)
                results.append(layer(x))
    finally:
        assert native_library.library().choose_instruction_set(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("activation", "is_gated"), FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_and_bias_are_fused(isa, activation, is_gated, kind):
    weight, x, bias = random_superblocks(kind, 90, 256), whole_rows(5, 256) / 127, torch.randn(90)
    y = NATIVE.superblocks(weight, bias, Fusion(None, activation, is_gated))(x)
    wide = (x.double() @ dequantized(weight).T + bias).float()
    act = REFERENCE.gated_activation if is_gated else REFERENCE.activation
    torch.testing.assert_close(y, act(wide, activation).bfloat16(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_residual_and_factor_are_fused(isa, kind):
    weight, x = random_superblocks(kind, 40, 512), torch.randn(6, 512)
    norm = Norm("rms", torch.rand(512) + 0.5, None, 1e-6)
    residual = torch.randn(6, 40)
    y = NATIVE.superblocks(weight, None, Fusion(norm), factor=-0.5)(x, residual.clone())
    normed = REFERENCE.rms_norm(x, norm.weight, norm.eps).double()
    step = normed.abs().amax(1, keepdim=True) / 127
    wide = dequantized(weight) * -0.5
    bound = 0.51 * step * wide.abs().sum(1) + 1e-5
    assert bool(((y - (normed @ wide.T + residual)).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
def test_scales_may_be_zero_or_subnormal(isa, kind):
    weight = random_superblocks(kind, 40, 512)
    weight.scales[:, 0] = 2.0**-24
    weight.scales[::2, 1] = 0.0
    weight.steps[::3] = 0
    x = whole_rows(4, 512)
    wrong = (NATIVE.superblocks(weight, None)(x) - x.double() @ dequantized(weight).T).abs()
    assert bool((wrong <= error_bound(x, magnitudes(weight), kind)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_bits_of_their_layers(isa, kind):
    fusion = Fusion(None, "silu", True)
    ups: list[LinearOp] = []
    downs: list[LinearOp] = []
    for _ in range(5):
        ups.append(NATIVE.superblocks(random_superblocks(kind, 512, 512), None, fusion))
        downs.append(NATIVE.superblocks(random_superblocks("q6_k", 512, 256), torch.randn(512)))
    chosen = torch.rand(40, 5).argsort(1)[:, :2].int()
    routing, x = Routing(chosen, torch.rand(40, 2)), torch.randn(40, 512)
    grouped = NativeExperts(ups, downs, False)(x, routing)
    assert torch.equal(grouped, ExpertsOneByOne(ups, downs, False)(x, routing))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_have_the_bits_of_their_layers(isa, kind):
    ops: list[LinearOp] = [
        NATIVE.superblocks(random_superblocks(kind, 40, 256), None) for _ in range(3)
    ]
    x = torch.randn(9, 3, 256)
    assert torch.equal(NativeHeads(ops)(x), HeadsOneByOne(ops)(x))


def test_layers_of_different_kinds_are_no_experts():
    ops = [NATIVE.superblocks(random_superblocks(kind, 256, 256), None) for kind in KINDS[:2]]
    with pytest.raises(ValueError, match="not of one shape"):
        NativeExperts(ops, ops, False)


def test_weights_of_other_shapes_and_types_are_refused():
    weight = random_superblocks("q5_k", 40, 512)
    for wrong in (
        weight._replace(codes=weight.codes | 32),
        weight._replace(steps=weight.steps[:, 1:]),
        weight._replace(scales=weight.scales.float()),
        weight._replace(lifts=None),
        weight._replace(kind="q6_k"),
    ):
        with pytest.raises(AssertionError):
            NATIVE.superblocks(wrong, None)
