"""Published formats mean the numbers that their descriptions say, exactly or to a stated loss."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from quant.formats.base import CheckpointFormat, PackedWeight, TensorRule
from quant.formats.read import read_format
from tests.support.engine.format_writers import (
    Json,
    Quantize,
    Tensors,
    bnb4,
    fp8,
    fp8_blocks,
    hqq,
    mxfp4_experts,
)
from tests.support.engine.published_formats import EXACT, PUBLISHED, ROUNDED, bnb_config, hqq_config

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)

TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Stored:
    shape: tuple[int, ...]
    dtype: str


def header(tensors: Tensors) -> dict[str, Stored]:
    return {name: Stored(tuple(t.shape), TYPES[t.dtype]) for name, t in tensors.items()}


def fetching(tensors: Tensors):
    def fetch(name: str, index: int | None = None) -> Tensor:
        return tensors[name] if index is None else tensors[name][index]

    return fetch


def written(quantize: Quantize, *sizes: int, num_in: int) -> tuple[Tensors, Tensor, list[str]]:
    """Returns the tensors of products of some sizes, their plain weight, and their names."""
    generator = torch.Generator().manual_seed(sum(sizes) + num_in)
    tensors, plain, names = {}, [], []
    for number, size in enumerate(sizes):
        name = f"model.layers.0.p{number}"
        made, meant = quantize(name, torch.randn(size, num_in, generator=generator) * 0.02)
        tensors |= made
        plain.append(meant)
        names.append(name)
    return tensors, torch.cat(plain), names


def loaded(form: CheckpointFormat, tensors: Tensors, names: list[str], *shape: int) -> PackedWeight:
    product = form.of(header(tensors), names[0], shape[1], shape[0])
    assert product is not None
    return product.load(fetching(tensors), names)


def computed(weight: PackedWeight) -> Tensor:
    """Returns the weight that a product computes with: rows of one value are not rounded."""
    return weight.linear(None)(torch.eye(weight.shape[1])).t()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_plain_weight_is_what_the_description_says(case):
    config, quantize = PUBLISHED[case]
    tensors, plain, names = written(quantize, 40, 24, num_in=96)
    weight = loaded(read_format(config), tensors, names, 40, 96)
    assert weight.shape == (64, 96)
    torch.testing.assert_close(weight.plain(), plain, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("case", EXACT)
def test_an_exact_format_computes_with_these_numbers(case):
    config, quantize = EXACT[case]
    tensors, plain, names = written(quantize, 40, 24, num_in=96)
    form = read_format(config)
    assert all(product.loss is None for product in form.formats)
    assert form.bits == (8 if case.startswith(("w8a16", "gptq8", "bnb-int8")) else 4)
    weight = loaded(form, tensors, names, 40, 96)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, 0] = 127.0
    bound = 1e-5 * (x.double().abs() @ plain.double().abs().T)
    assert bool(((weight.linear(None)(x) - x.double() @ plain.double().T).abs() <= bound).all())


# Each loss that is said, with the usual size of a group.
LOSSES: dict[str, tuple[Json, Quantize]] = {
    name: ROUNDED[name] for name in ("w8a16", "fp8-blocks", "fp8-output", "fp8-tensor", "hqq8")
} | {
    "hqq4": (hqq_config(4, 64), hqq(4, 64)),
    "bnb-nf4": (bnb_config("nf4", is_nested=False), bnb4("nf4", 64, is_nested=False)),
    "bnb-nf4-nested": (bnb_config("nf4", is_nested=True), bnb4("nf4", 64, is_nested=True)),
    "bnb-fp4": (bnb_config("fp4", is_nested=True), bnb4("fp4", 64, is_nested=True)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_of_normal_weights_is_what_is_said(case):
    config, quantize = LOSSES[case]
    tensors, plain, names = written(quantize, 256, num_in=4096)
    form = read_format(config)
    weight = loaded(form, tensors, names, 256, 4096)
    (loss,) = {product.loss for product in form.formats}
    assert loss is not None
    (percent,) = re.findall(r"about ([\d.]+) %", loss)
    assert float(percent) == pytest.approx(100 * relative(computed(weight), plain), rel=0.1)


@pytest.mark.parametrize("case", ROUNDED)
def test_a_loss_is_said_and_small(case):
    config, quantize = ROUNDED[case]
    tensors, plain, names = written(quantize, 40, 24, num_in=96)
    form = read_format(config)
    assert all(product.loss for product in form.formats)
    assert relative(computed(loaded(form, tensors, names, 40, 96)), plain) < 0.012


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_factor_and_an_order_of_outputs_change_nothing_else(case):
    config, quantize = PUBLISHED[case]
    tensors, _, names = written(quantize, 40, 24, num_in=96)
    weight = loaded(read_format(config), tensors, names, 40, 96)
    order = torch.randperm(64)[:50]
    changed = weight.scaled(0.3).rows(order).scaled(-2.0)
    assert changed.shape == (50, 96)
    torch.testing.assert_close(changed.plain(), weight.plain()[order] * -0.6, rtol=1e-6, atol=0)
    want = computed(weight)[order] * -0.6
    torch.testing.assert_close(computed(changed), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_rules_of_tensors_are_those_of_the_files(case):
    config, quantize = PUBLISHED[case]
    tensors, _, (name,) = written(quantize, 40, num_in=96)
    stored = header(tensors)
    form = read_format(config).of(stored, name, 96, 40)
    assert form is not None
    rules = form.tensors(96, 40)
    assert all(rule.fits(stored.get(f"{name}.{ending}")) for ending, rule in rules.items())
    known = {f"{name}.{ending}" for ending in (*rules, *form.ignored)}
    assert set(tensors) <= known
    assert read_format(config).of({}, name, 96, 40) is None


def test_products_of_one_checkpoint_may_differ():
    """Their tensors show which group they are in, not the lists of config.json."""
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            f"group_{number}": PUBLISHED[case][0]["config_groups"]["group_0"]
            | {"format": PUBLISHED[case][0]["format"], "targets": ["re:.*nothing(a+)+$"]}
            for number, case in enumerate(
                ("w4a16", "w8a16", "nvfp4", "mxfp4", "float-channel", "w4a16-channel")
            )
        },
        "ignore": ["re:(a|aa)+$"],
    }
    form = read_format(config)
    for case in ("w4a16", "w8a16", "nvfp4", "mxfp4", "float-channel", "w4a16-channel"):
        tensors, plain, names = written(PUBLISHED[case][1], 40, num_in=96)
        weight = loaded(form, tensors, names, 40, 96)
        torch.testing.assert_close(weight.plain(), plain, rtol=2e-6, atol=1e-9)
    plain_tensors = {"model.layers.0.p0.weight": torch.ones(40, 96)}
    assert form.of(header(plain_tensors), "model.layers.0.p0", 96, 40) is None


def test_modelopt_of_mixed_precision():
    form = read_format({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    for case in ("nvfp4-modelopt", "modelopt-fp8", "modelopt-blocks", "mxfp8"):
        tensors, plain, names = written(PUBLISHED[case][1], 40, num_in=96)
        weight = loaded(form, tensors, names, 40, 96)
        torch.testing.assert_close(weight.plain(), plain, rtol=2e-6, atol=1e-9)


def test_fused_experts_of_mxfp4_are_read_one_by_one():
    weights = torch.randn(3, 40, 96) * 0.02
    tensors, plain = mxfp4_experts("model.layers.0.mlp.experts.gate_up_proj", weights)
    form, name = read_format({"quant_method": "mxfp4"}), "model.layers.0.mlp.experts.gate_up_proj"
    experts = form.of_experts(header(tensors), name, 3, 96, 40)
    assert experts is not None and experts.loss is None
    check_experts(experts.expert_tensors(3, 96, 40), name, tensors)
    gates_first = torch.cat([torch.arange(0, 40, 2), torch.arange(1, 40, 2)])
    for expert in range(3):
        weight = experts.load_expert(only_slices(tensors), name, expert)
        torch.testing.assert_close(weight.plain(), plain[expert])
        torch.testing.assert_close(computed(weight), plain[expert], rtol=1e-6, atol=0)
        gates = weight.rows(gates_first).plain()[:20]
        torch.testing.assert_close(gates, plain[expert][0::2])
    assert form.of(header(tensors), "model.layers.0.self_attn.q_proj", 96, 40) is None
    assert form.of_experts({}, name, 3, 96, 40) is None


@pytest.mark.parametrize("is_block", [True, False])
def test_fused_experts_of_fp8(is_block):
    block = [128, 128] if is_block else None
    quantize = (
        fp8_blocks("weight_scale_inv", 128, 128)
        if is_block
        else fp8("weight_scale_inv", (), per_tensor=True)
    )
    name = "model.layers.0.mlp.experts.down_proj"
    made = [quantize("e", torch.randn(136, 96)) for _ in range(3)]
    tensors = {
        name: torch.stack([each["e.weight"].view(torch.uint8) for each, _ in made]).view(
            torch.float8_e4m3fn
        ),
        f"{name}_scale_inv": torch.stack([each["e.weight_scale_inv"] for each, _ in made]),
    }
    form = read_format({"quant_method": "fp8", "weight_block_size": block})
    experts = form.of_experts(header(tensors), name, 3, 96, 136)
    assert experts is not None and experts.loss
    check_experts(experts.expert_tensors(3, 96, 136), name, tensors)
    for expert, (_, plain) in enumerate(made):
        weight = experts.load_expert(only_slices(tensors), name, expert)
        torch.testing.assert_close(weight.plain(), plain, rtol=1e-6, atol=0)


def check_experts(rules: dict[str, TensorRule], name: str, tensors: Tensors) -> None:
    stored = header(tensors)
    assert {f"{name}{ending}" for ending in rules} == set(tensors)
    assert all(rule.fits(stored[f"{name}{ending}"]) for ending, rule in rules.items())


def only_slices(tensors: Tensors):
    def fetch(name: str, index: int | None = None) -> Tensor:
        assert index is not None, "one expert must not read the others"
        return tensors[name][index]

    return fetch


def test_the_tables_of_bitsandbytes_are_near_those_of_the_kernels():
    """A loss of a few tenths of a percent is only true if each code has its neighbour."""
    for case in ("bnb-nf4", "bnb-fp4"):
        config, quantize = ROUNDED[case]
        tensors, _, names = written(quantize, 64, num_in=96)
        weight = loaded(read_format(config), tensors, names, 64, 96)
        scales = weight.plain().reshape(64, -1, 32).abs().amax(2)
        steps = (computed(weight) - weight.plain()).reshape(64, -1, 32) / scales[..., None]
        assert float(steps.abs().max()) < 0.006


class WithFp8:
    """Products of a device that has fp8, for the choice of a weight."""

    def __init__(self) -> None:
        self.int8, self.int4 = NATIVE.int8, NATIVE.int4
        self.given: list[tuple[Tensor, Tensor]] = []

    def fp8(self, parts, bias, fusion, *, scales=None):
        self.given.append((parts[0], scales))
        return NATIVE.int8([plain_fp8(parts[0], scales)], bias, fusion)


def plain_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns codes times their scales: [out], or [out, groups] of 128 inputs."""
    wide = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, 1)
    return codes.float() * wide[:, : codes.shape[1]]


@pytest.mark.parametrize(
    ("case", "is_native"),
    [
        ("fp8-tensor", True),
        ("fp8-output", True),
        ("float-channel", True),
        ("fp8-blocks", True),
        ("fp8-small-blocks", False),
    ],
)
def test_a_device_with_fp8_gets_the_codes_as_they_are(case, is_native):
    config, quantize = ROUNDED[case]
    tensors, plain, names = written(quantize, 40, 24, num_in=192)
    weight, linears = loaded(read_format(config), tensors, names, 40, 192), WithFp8()
    weight.linear(None, linears=linears)
    assert len(linears.given) == is_native
    for codes, scales in linears.given:
        torch.testing.assert_close(plain_fp8(codes, scales), plain, rtol=1e-6, atol=0)
