"""Quantized checkpoints, written here nibble by nibble, are loaded and computed."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops import Fusion, LinearOp, get_backend
from ops.backend import INT4_GROUPS
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from ops.reference import ReferenceBackend
from quant.int4 import quantize_int4, quantize_nf4
from serve import LLM, SamplingParams
from serve.cli.quality import evaluate
from serve.config import WEIGHT_GROUPS, EngineConfig
from serve.errors import ConfigError
from serve.loading.precision import resolve_precision
from serve.models import load_model, read_spec
from serve.models.weights import joining
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.decoders import run, token_ids
from tests.support.engine.published_formats import ROUNDED
from tests.support.engine.quantized import (
    ALL_CASES,
    AWQ,
    CASES,
    GPTQ,
    LAYERS,
    Tensors,
    four_bits,
    write,
)

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


def rounding_linear(weight: Tensor, bias: Tensor | None, fusion: Fusion) -> LinearOp:
    """Returns a plain product on rows rounded to int8 as the kernels round them."""
    reference = ReferenceBackend()
    size = weight.shape[1]
    before = reference.pack_linear(torch.eye(size), None, Fusion(fusion.norm))
    after = reference.pack_linear(weight.float(), bias, fusion._replace(norm=None))

    def product(x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = before(x.float())
        step = x.abs().amax(1, keepdim=True) / 127
        y = after(torch.where(step > 0, (x / step).round() * step, 0.0))
        if fusion.activation is not None:
            y = y.bfloat16().float()
        return y if residual is None else y + residual

    return product


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["base", "bias"])
def test_logits_equal_those_of_the_plain_numbers(case, variant, tmp_path):
    packed, plain = write(tmp_path, *CASES[case], variant=variant)
    ids, backend = token_ids(40), get_backend("cpu")
    settings = {"dtype": torch.float32, "backend": backend}
    got = run(load_model(packed, make_linear=NATIVE.int8, **settings), ids)
    rounded = load_model(
        plain, make_linear=joining(rounding_linear), make_head=NATIVE.int8, **settings
    )
    rounded_logits, plain_logits = run(rounded, ids), run(load_model(plain, **settings), ids)
    # apart from values so near to a half that the order of a sum decides their rounding
    assert relative(got, rounded_logits) < 0.02
    assert relative(got, plain_logits) < 1.2 * relative(rounded_logits, plain_logits)


@pytest.mark.parametrize("case", ROUNDED)
def test_weights_that_are_rounded_again_lose_no_more_than_int8(case, tmp_path):
    packed, plain = write(tmp_path, *ROUNDED[case])
    ids, settings = token_ids(40), {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, make_linear=NATIVE.int8, **settings), ids)
    int8 = run(load_model(plain, make_linear=NATIVE.int8, **settings), ids)
    plain_logits = run(load_model(plain, **settings), ids)
    assert relative(got, plain_logits) < 1.1 * relative(int8, plain_logits)


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_exact_on_whole_rows(case, tmp_path):
    config, quantize = CASES[case]
    packed, plain = write(tmp_path, config, quantize)
    form, tensors = read_spec(packed).packed, load_file(packed / "model.safetensors")
    assert form is not None
    wide = load_file(plain / "model.safetensors")
    for parts in (LAYERS[:3], LAYERS[3:4], LAYERS[4:6], LAYERS[6:7]):
        weight = torch.cat([wide[f"{part}.weight"] for part in parts]).double()
        x = torch.randint(-127, 128, (9, weight.shape[1])).float()
        x[:, 0] = 127.0
        got = form.formats[0].load(tensors.__getitem__, parts).linear(None)(x)
        bound = 1e-5 * (x.double().abs() @ weight.abs().T)
        assert bool(((got - x.double() @ weight.T).abs() <= bound).all()), parts


@pytest.mark.parametrize("case", ALL_CASES)
def test_an_unpacked_checkpoint_is_the_plain_model(case, tmp_path):
    packed, plain = write(tmp_path, *ALL_CASES[case], variant="bias")
    ids, settings = token_ids(40), {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, unpack=True, **settings), ids)
    assert relative(got, run(load_model(plain, **settings), ids)) < 1e-5


@pytest.mark.parametrize("dtype", ["int4", "nf4"])
def test_rounded_weights_equal_the_weights_of_the_product(dtype):
    rounded = {"int4": quantize_int4, "nf4": quantize_nf4}[dtype](torch.randn(24, 100))
    x = torch.randint(-127, 128, (3, 100)).float()
    x[:, 0] = 127.0
    torch.testing.assert_close(rounded.linear(None)(x), x @ rounded.plain().T, rtol=1e-4, atol=1e-3)


def test_a_quantized_checkpoint_that_cannot_use_int8_rows_is_unpacked(tmp_path, caplog):
    """OPT's outlying activations must not be rounded to int8."""
    packed, _ = write(tmp_path, GPTQ, four_bits(GPTQ))
    config, spec = EngineConfig(model=str(packed)), read_spec(packed)
    with caplog.at_level("INFO"):
        precision = resolve_precision(config, replace(spec, tolerates_int8=False))
    assert str(precision).startswith("gptq as ") and not precision.is_int8
    assert "its gptq weights are unpacked" in caplog.text
    asked = resolve_precision(replace(config, dtype="int8"), replace(spec, tolerates_int8=False))
    assert asked.is_int8


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["w8a8", "gptq-order", "awq"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_unpacks_on_request(case, dtype, tmp_path):
    packed, plain = write(tmp_path, *CASES[case])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    token_ids = []
    for path in (packed, plain):
        with LLM(str(path), dtype=dtype, max_model_len=64) as llm:
            token_ids.append(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
    assert token_ids[0] == token_ids[1]


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("method", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_larger_groups(method, group, tmp_path):
    config = method | {"group_size": group}
    weight = torch.randn(40, 256)
    tensors, wide = four_bits(config)("model.layers.0.mlp.down_proj", weight)
    spec_path, _ = write(tmp_path, method, four_bits(method))
    edit_json(spec_path / "config.json", lambda c: c.update(quantization_config=config))
    form = read_spec(spec_path).packed
    assert form is not None
    x = torch.randint(-127, 128, (3, 256)).float()
    x[:, 0] = 127.0
    product = form.formats[0].load(tensors.__getitem__, ["model.layers.0.mlp.down_proj"])
    got = product.linear(None)(x)
    bound = 1e-5 * (x.double().abs() @ wide.double().abs().T)
    assert bool(((got - x.double() @ wide.double().T).abs() <= bound).all())


def test_a_quantized_head_is_used(tmp_path):
    packed, plain = write(tmp_path, GPTQ | {"lm_head": True}, four_bits(GPTQ), head=True)
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, make_linear=NATIVE.int8, **settings), token_ids(20))
    assert relative(got, run(load_model(plain, **settings), token_ids(20))) < 0.1


def test_layers_left_plain_are_rounded_at_load(tmp_path):
    """Tensors in modules_to_not_convert are plain, whatever else the config lists."""
    down = [name for name in LAYERS if "down_proj" in name]

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if name in down:
            return {f"{name}.weight": weight}, weight
        return four_bits(AWQ)(name, weight)

    packed, plain = write(tmp_path, AWQ | {"modules_to_not_convert": ["down_proj"]}, quantize)
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, make_linear=NATIVE.int8, **settings), token_ids(20))
    assert relative(got, run(load_model(plain, **settings), token_ids(20))) < 0.1


@pytest.mark.parametrize("case", ["w8a8", "gptq", "awq"])
def test_the_engine_serves_it(case, tmp_path):
    packed, _ = write(tmp_path, *CASES[case])
    precision = resolve_precision(EngineConfig(model=str(packed)), read_spec(packed))
    assert str(precision).startswith(CASES[case][0]["quant_method"])
    with LLM(str(packed), max_model_len=64) as llm:
        out = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        )
    assert len(out[0].outputs[0].token_ids) == 8
    for dtype in ("int4", "nf4"):
        with pytest.raises(ConfigError, match="already quantized"):
            resolve_precision(EngineConfig(dtype=dtype), read_spec(packed))


@pytest.mark.parametrize("dtype", ["int4", "nf4"])
def test_plain_checkpoints_are_rounded_to_four_bits(dtype):
    path = str(checkpoint("llama"))
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 30]
    with LLM(path, dtype=dtype, max_model_len=64) as llm:
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    assert together == alone


@pytest.mark.parametrize("dtype", ["int4", "nf4"])
def test_the_group_of_four_bit_weights_is_a_setting(dtype):
    kl = {}
    for group in WEIGHT_GROUPS:
        precisions = [("float32", "float32"), (dtype, "float32")]
        path = str(checkpoint("llama"))
        text = "Seven sailors saw the sea. " * 8
        results = evaluate(path, text, precisions, max_tokens=80, weight_group=group)
        kl[group] = results[1].kl
    assert len(set(kl.values())) == 4 and max(kl.values()) < 1.0
    assert WEIGHT_GROUPS == INT4_GROUPS


class Allocations(TorchDispatchMode):
    """Records the largest number of bytes of tensors that were alive at once under it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func._schema.returns[0].alias_info:
            number, size = id(out), out.numel() * out.element_size()
            self._alive[number] = size
            weakref.finalize(out, self._alive.pop, number)
            self.most = max(self.most, sum(self._alive.values()))
        return out


@pytest.mark.parametrize("case", ["gptq", "gptq-order", "awq"])
def test_unpacking_takes_two_bytes_a_weight(case, tmp_path):
    """Unpacking all words at once in 32 bits would take eight."""
    config, quantize = CASES[case]
    name = "model.layers.0.mlp.down_proj"
    tensors, _ = quantize(name, torch.randn(512, 1024))
    path, _ = write(tmp_path, config, quantize)
    form = read_spec(path).packed
    assert form is not None
    with Allocations() as allocations:
        form.formats[0].load(tensors.__getitem__, [name])
    # scales and zero points of groups of 32 add a few tenths
    assert 512 * 1024 < allocations.most < 2.5 * 512 * 1024
