"""Every kind of GGUF files means what the package `gguf` says, and products compute with that."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from ops.backend import Fusion, Norm
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NativeLinears
from quant.formats.gguf.blocks import LAYOUTS, SUPERBLOCKS
from quant.formats.gguf.formats import (
    FORMATS,
    GGUF,
    BlockWeight,
    _warn_of_loss,
    check_blocks,
    dequantized,
)
from quant.formats.gguf.kinds import BY_NAME, KINDS
from tests.support.gguf.quantize import dequantize, quantize

needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
EVERY = tuple(LAYOUTS)
EXACT = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS")


def random_bytes(kind: str, rows: int, blocks: int, seed: int = 0) -> Tensor:
    """Returns blocks of any bytes whose fp16 numbers are finite, also subnormal and negative."""
    size = BY_NAME[kind].num_bytes
    made = np.random.default_rng(seed).integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in LAYOUTS[kind].halves:
        made[:, at + 1] &= 0xBF
    if kind == "MXFP4":
        made[:, 0] = made[:, 0] % 143
    return torch.from_numpy(made.reshape(rows, -1))


def normal(kind: str, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns blocks of weights that are about normal, and what they mean."""
    generator = torch.Generator().manual_seed(seed)
    blocks = quantize(kind, torch.randn(shape, generator=generator) * 0.02)
    return torch.from_numpy(blocks), torch.from_numpy(dequantize(kind, blocks))


def computed(weight: BlockWeight) -> Tensor:
    """Returns the weight that a product computes with: rows of one value are not rounded."""
    return weight.linear(None)(torch.eye(weight.shape[1])).t()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_numbers_and_sizes_of_types_are_those_of_the_package():
    for number, kind in KINDS.items():
        known = gguf.GGMLQuantizationType(number)
        assert kind == (known.name, *gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("kind", EVERY)
def test_any_bytes_are_the_numbers_that_the_package_says(kind):
    stored = random_bytes(kind, 40, 4)
    expected = torch.from_numpy(dequantize(kind, stored.numpy()))
    assert torch.equal(BlockWeight(kind, (stored,)).plain(), expected)
    assert torch.equal(BlockWeight(kind, (stored[:7], stored[7:])).plain(), expected)


@pytest.mark.parametrize("kind", EVERY)
def test_pieces_change_no_number(kind, monkeypatch):
    stored = random_bytes(kind, 40, 4)
    weight = BlockWeight(kind, (stored[:11], stored[11:]))
    whole = weight.plain()
    monkeypatch.setattr("quant.formats.gguf.formats._PIECE_WEIGHTS", 3 * weight.shape[1])
    assert torch.equal(weight.plain(), whole)
    again = dequantized(kind, stored.view(4, 10, -1), torch.float32)
    assert torch.equal(again, whole.view(4, 10, -1))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_in_a_float_type_are_rounded_once(kind, dtype):
    stored, plain = normal(kind, 9, 512)
    assert torch.equal(dequantized(kind, stored, dtype), plain.to(dtype))


def product_bound(kind: str, plain: Tensor, x: Tensor) -> Tensor:
    """Returns the most by which a product of whole numbers that fit int8 may be wrong."""
    magnitudes = x.double().abs()
    exact = 1e-5 * (magnitudes @ plain.double().abs().T)
    if kind in EXACT:
        return exact
    if FORMATS[kind].bits == 8:  # half a step of each output
        steps = plain.double().abs().amax(1) / 127
        return exact + 0.5001 * magnitudes.sum(1, keepdim=True) * steps
    # 2^-12 of the code times the scale, and of the minimum: at most 2 w and w, if w is the largest
    # magnitude of a group
    groups = plain.double().view(len(plain), -1, LAYOUTS[kind].group).abs().amax(2)
    largest = groups.repeat_interleave(LAYOUTS[kind].group, 1)
    return exact + 3 * 2.0**-12 * (magnitudes @ largest.T)


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_products_are_within_what_the_kernels_round(kind, isa):
    stored, plain = normal(kind, 40, 768)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-127, 128, (9, 768), generator=generator).float()
    x[:, 0] = 127.0
    wrong = (BlockWeight(kind, (stored,)).linear(None)(x) - x.double() @ plain.double().T).abs()
    assert bool((wrong <= product_bound(kind, plain, x)).all())


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_the_loss_is_what_is_said(kind):
    stored, plain = normal(kind, 256, 4096)
    change = relative(computed(BlockWeight(kind, (stored,))), plain)
    loss = FORMATS[kind].loss
    if kind in EXACT:
        assert loss is None and change < 1e-6
    else:
        assert loss is not None and loss.startswith(kind)
        (percent,) = re.findall(r"about ([\d.]+) %", loss)
        assert float(percent) == pytest.approx(100 * change, rel=0.1)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q5_1", "Q5_K", "Q4_1", "Q4_K", "Q2_K"])
def test_groups_of_one_value(kind):
    """Their scale is zero, and all of the weight is the minimum."""
    size = BY_NAME[kind]
    blocks = random_bytes(kind, 6, 8).view(6, 8, size.num_bytes)
    scale, minimum = LAYOUTS[kind].halves
    half = torch.tensor([0.0, 0.5], dtype=torch.float16).view(torch.uint8)
    blocks[:, ::2, scale : scale + 2] = half[:2]
    blocks[:, ::2, minimum : minimum + 2] = half[2:]
    blocks[:, 1::2, scale : scale + 2] = half[:2]
    blocks[:, 1::2, minimum : minimum + 2] = half[:2]
    stored = blocks.flatten(1)
    expected = torch.from_numpy(dequantize(kind, stored.numpy()))
    assert expected.any()
    weight = BlockWeight(kind, (stored,))
    assert torch.equal(weight.plain(), expected)
    steps = expected.abs().amax(1, keepdim=True) / 127
    assert bool(((computed(weight) - expected).abs() <= 0.501 * steps).all())


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_some_outputs_are_those_of_the_whole_product_to_the_bit(kind):
    """A rank that holds some of the outputs computes what one process computes."""
    stored, plain = normal(kind, 192, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(5))
    whole = BlockWeight(kind, (stored,)).linear(None)(x)
    rows = FORMATS[kind].cut("weight", stored, slice(64, 129))
    cut = BlockWeight(kind, (rows,))
    assert torch.equal(cut.plain(), plain[64:129])
    assert torch.equal(cut.linear(None)(x), whole[:, 64:129])
    order = torch.randperm(192, generator=torch.Generator().manual_seed(6))[:70]
    halves = BlockWeight(kind, (stored[:100], stored[100:])).rows(order)
    assert torch.equal(halves.plain(), plain[order])
    assert torch.equal(halves.linear(None)(x), whole[:, order])


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_large_products_are_unpacked_into_pages_of_their_own(kind, monkeypatch):
    stored, _ = normal(kind, 192, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(5))
    expected = BlockWeight(kind, (stored,)).linear(None)(x)
    monkeypatch.setattr("quant.formats.gguf.formats._LARGE_BYTES", 1)
    assert torch.equal(BlockWeight(kind, (stored,)).linear(None)(x), expected)


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_a_factor_changes_nothing_else(kind):
    stored, plain = normal(kind, 40, 256)
    weight = BlockWeight(kind, (stored,))
    changed = weight.scaled(0.3).scaled(-2.0)
    assert changed.shape == (40, 256)
    torch.testing.assert_close(changed.plain(), plain * -0.6, rtol=1e-6, atol=0)
    torch.testing.assert_close(computed(changed), computed(weight) * -0.6, rtol=1e-5, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_norm_activation_and_bias_are_fused_as_with_plain_weights(kind):
    stored, plain = normal(kind, 64, 256)
    fusion = Fusion(Norm("rms", torch.rand(256) + 0.5, None, 1e-6), "silu", is_gated=True)
    bias = torch.randn(64)
    x = torch.randn(5, 256)
    normed = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * fusion.norm.weight
    gate, up = (normed @ plain.T + bias).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    result = BlockWeight(kind, (stored,)).linear(bias, fusion)(x)
    assert relative(result.float(), expected) < 0.02


class Stored:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


@pytest.mark.parametrize("kind", EVERY)
def test_the_type_of_a_tensor_decides(kind):
    header = {"a.weight": Stored((40, 256), kind), "b.weight": Stored((40, 256), "BF16")}
    form = GGUF.of(header, "a", 256, 40)
    assert form is FORMATS[kind] and GGUF.has(header, "a") and not GGUF.has(header, "b")
    assert GGUF.of(header, "b", 256, 40) is None and GGUF.of(header, "c", 256, 40) is None
    (rule,) = form.tensors(256, 40).values()
    assert rule.fits(header["a.weight"])
    assert not rule.fits(Stored((40, 512), kind)) and not rule.fits(header["b.weight"])
    with pytest.raises(ValueError, match=f"inputs are no whole blocks of {kind}"):
        form.tensors(257, 40)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ1_0", "I8"])
def test_a_kind_that_nothing_unpacks_is_named_with_its_tensor(kind):
    header = {"a.weight": Stored((40, 256), kind), "e": Stored((2, 40, 256), kind)}
    assert GGUF.has(header, "a") and GGUF.has(header, "e")
    message = f"tensor {{}} has type {kind}, which is not supported; only Q4_0, "
    with pytest.raises(ValueError, match=message.format("a.weight")):
        GGUF.of(header, "a", 256, 40)
    with pytest.raises(ValueError, match=message.format("e")):
        GGUF.of_experts(header, "e", 2, 256, 40)
    with pytest.raises(ValueError, match=message.format("b.weight")):
        check_blocks(kind, "b.weight", torch.zeros(4, BY_NAME[kind].num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64"])
def test_plain_tensors_have_no_format(kind):
    header = {"a.weight": Stored((40, 256), kind), "e": Stored((2, 40, 256), kind)}
    assert GGUF.of(header, "a", 256, 40) is None and not GGUF.has(header, "a")
    assert GGUF.of_experts(header, "e", 2, 256, 40) is None and not GGUF.has(header, "e")


@pytest.mark.parametrize("kind", EVERY)
def test_fused_experts_are_read_one_by_one(kind):
    stored, plain = normal(kind, 3, 40, 256)
    header = {"e": Stored((3, 40, 256), kind)}
    form = GGUF.of_experts(header, "e", 3, 256, 40)
    assert form is not None and GGUF.has(header, "e")
    (rule,) = form.expert_tensors(3, 256, 40).values()
    assert rule.fits(header["e"])

    def fetch(name: str, index: int | None = None) -> Tensor:
        assert index is not None, "one expert must not read the others"
        return {"e": stored}[name][index]

    for expert in range(3):
        assert torch.equal(form.load_expert(fetch, "e", expert).plain(), plain[expert])


@pytest.mark.parametrize("kind", EVERY)
def test_products_of_several_parts_are_concatenated(kind):
    stored, plain = normal(kind, 72, 256)
    tensors = {"q.weight": stored[:40], "k.weight": stored[40:]}
    weight = FORMATS[kind].load(lambda name, index=None: tensors[name], ["q", "k"])
    assert weight.shape == (72, 256) and torch.equal(weight.plain(), plain)


@pytest.mark.parametrize("kind", EVERY)
def test_scales_that_are_no_numbers_are_refused(kind):
    for at in LAYOUTS[kind].halves:
        for bits in (0x7C00, 0xFC00, 0x7E01):
            stored = random_bytes(kind, 4, 3)
            check_blocks(kind, "a.weight", stored)
            begin = BY_NAME[kind].num_bytes * 2 + at
            stored[2, begin : begin + 2] = torch.tensor([bits & 255, bits >> 8])
            with pytest.raises(ValueError, match=r"tensor a.weight holds NaN or infinity"):
                FORMATS[kind].load(lambda name, index=None, s=stored: s, ["a"])


@pytest.mark.parametrize(
    ("exponent", "message"), [(255, "holds NaN"), (143, r"holds a scale of 2\^16")]
)
def test_powers_that_no_product_takes_are_refused(exponent, message):
    stored = random_bytes("MXFP4", 4, 3)
    check_blocks("MXFP4", "a.weight", stored)
    stored[1, 17] = exponent
    with pytest.raises(ValueError, match=f"tensor a.weight {message}"):
        check_blocks("MXFP4", "a.weight", stored)


@needs_kernels
@pytest.mark.parametrize("kind", EVERY)
def test_bytes_in_memory_are_those_of_the_kernels(kind):
    stored, _ = normal(kind, 512, 1024)
    op = BlockWeight(kind, (stored,)).linear(None)
    assert op.size_bytes == pytest.approx(
        FORMATS[kind].memory_bytes(512 * 1024, has_superblocks=True), rel=0.03
    )


class FewerLinears(NativeLinears):
    """Linear layers of a device without products of weights in superblocks."""

    has_superblocks = False


@needs_kernels
@pytest.mark.parametrize("kind", SUPERBLOCKS)
def test_devices_without_superblocks_round_them_and_say_so(kind, caplog):
    stored, plain = normal(kind, 256, 4096)
    _warn_of_loss.cache_clear()
    weight = BlockWeight(kind, (stored,))
    with caplog.at_level("WARNING"):
        ops = [weight.linear(None, linears=FewerLinears()) for _ in range(2)]
    size = FORMATS[kind].memory_bytes(256 * 4096, has_superblocks=False)
    assert ops[0].size_bytes == pytest.approx(size, rel=0.03)
    (record,) = caplog.records
    (percent,) = re.findall(r"about ([\d.]+) %", record.getMessage())
    change = relative(ops[0](torch.eye(4096)).t(), plain)
    assert float(percent) == pytest.approx(100 * change, rel=0.1)
