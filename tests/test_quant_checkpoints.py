"""Quantized checkpoints, written here nibble by nibble: loaded, computed, refused by name."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops import Edges, LinearOp, get_backend, native
from ops.reference import ReferenceBackend
from quant.linear import int8_linear
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError, ModelLoadError
from serve.models import load_model, read_spec
from serve.precision import resolve_precision
from tests.checkpoints import checkpoint, edit_json
from tests.quantized import (
    AWQ,
    GPTQ,
    LAYERS,
    W8A8,
    Json,
    Quantize,
    Tensors,
    four_bits,
    int8_tensors,
    write,
)
from tests.test_serve_models import run, token_ids

pytestmark = pytest.mark.skipif(not native.is_available(), reason="native kernels not built")


def rounding_linear(weight: Tensor, bias: Tensor | None, edges: Edges) -> LinearOp:
    """A plain product on rows rounded to int8 as the kernels round them."""
    reference = ReferenceBackend()
    size = weight.shape[1]
    before = reference.pack_linear(torch.eye(size), None, Edges(edges.norm))
    after = reference.pack_linear(weight.float(), bias, edges._replace(norm=None))

    def product(x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = before(x.float())
        step = x.abs().amax(1, keepdim=True) / 127
        y = after(torch.where(step > 0, (x / step).round() * step, 0.0))
        if edges.activation is not None:
            y = y.bfloat16().float()
        return y if residual is None else y + residual

    return product


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


CASES: dict[str, tuple[Json, Quantize]] = {
    "w8a8": (W8A8, int8_tensors),
    "w8a8-flat": (W8A8, lambda n, w: int8_tensors(n, w, (-1,))),
    "gptq": (GPTQ, four_bits(GPTQ)),
    "gptq-asym": (GPTQ | {"sym": False}, four_bits(GPTQ | {"sym": False})),
    "gptq-v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        four_bits(GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}),
    ),
    "gptq-channel": (GPTQ | {"group_size": -1}, four_bits(GPTQ | {"group_size": -1})),
    "gptq-order": (GPTQ | {"desc_act": True}, four_bits(GPTQ, has_order=True)),
    "awq": (AWQ, four_bits(AWQ)),
    "awq-channel": (AWQ | {"group_size": -1}, four_bits(AWQ | {"group_size": -1})),
    "awq-own-keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        four_bits(AWQ),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["base", "bias"])
def test_logits_are_those_of_the_numbers_it_stands_for(case, variant, tmp_path):
    packed, plain = write(tmp_path, *CASES[case], variant=variant)
    ids, backend = token_ids(40), get_backend("cpu")
    settings = {"dtype": torch.float32, "backend": backend}
    got = run(load_model(packed, make_linear=int8_linear, **settings), ids)
    rounded = load_model(plain, make_linear=rounding_linear, make_head=int8_linear, **settings)
    rounded_logits, plain_logits = run(rounded, ids), run(load_model(plain, **settings), ids)
    # apart from values so near to a half that the order of a sum decides where they go
    assert relative(got, rounded_logits) < 0.02
    assert relative(got, plain_logits) < 1.2 * relative(rounded_logits, plain_logits)


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
        got = form.load(tensors.__getitem__, parts).linear(None)(x)
        bound = 1e-5 * (x.double().abs() @ weight.abs().T)
        assert bool(((got - x.double() @ weight.T).abs() <= bound).all()), parts


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
    got = form.load(tensors.__getitem__, ["model.layers.0.mlp.down_proj"]).linear(None)(x)
    bound = 1e-5 * (x.double().abs() @ wide.double().abs().T)
    assert bool(((got - x.double() @ wide.double().T).abs() <= bound).all())


def test_a_quantized_head_is_taken(tmp_path):
    packed, plain = write(tmp_path, GPTQ | {"lm_head": True}, four_bits(GPTQ), head=True)
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, make_linear=int8_linear, **settings), token_ids(20))
    assert relative(got, run(load_model(plain, **settings), token_ids(20))) < 0.1


def test_layers_left_plain_are_rounded_here(tmp_path):
    """modules_to_not_convert: their tensors are plain, whatever the lists say."""
    down = [name for name in LAYERS if "down_proj" in name]

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if name in down:
            return {f"{name}.weight": weight}, weight
        return four_bits(AWQ)(name, weight)

    packed, plain = write(tmp_path, AWQ | {"modules_to_not_convert": ["down_proj"]}, quantize)
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    got = run(load_model(packed, make_linear=int8_linear, **settings), token_ids(20))
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
    for dtype in ("float32", "bfloat16", "int4", "nf4"):
        with pytest.raises(ConfigError, match="quantized already"):
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


class Allocations(TorchDispatchMode):
    """The most bytes of tensors made under it that were alive at once."""

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
    """It took eight: shifts of all words at once, in 32 bits."""
    config, quantize = CASES[case]
    name = "model.layers.0.mlp.down_proj"
    tensors, _ = quantize(name, torch.randn(512, 1024))
    path, _ = write(tmp_path, config, quantize)
    form = read_spec(path).packed
    assert form is not None
    with Allocations() as allocations:
        form.load(tensors.__getitem__, [name])
    # scales and zero points of groups of 32 are a few tenths more
    assert 512 * 1024 < allocations.most < 2.5 * 512 * 1024


# -- what is refused


def _with(config: Json, key: str, value: object) -> Json:
    """A copy with a value at a dotted key."""
    first, _, rest = key.partition(".")
    return config | {first: _with(config[first], rest, value) if rest else value}


GROUP = "config_groups.group_0"
REFUSED: list[tuple[Json, str, object]] = [
    (W8A8, "quant_method", "bitsandbytes"),
    (W8A8, "format", "float-quantized"),
    (W8A8, "format", "pack-quantized"),
    (W8A8, "quantization_status", "frozen"),
    (W8A8, "kv_cache_scheme", {"num_bits": 8}),
    (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}),
    (W8A8, "transform_config", {"config_groups": {"R1": {}}}),
    (W8A8, "config_groups", {}),
    (W8A8, "config_groups", {"group_0": None}),
    (W8A8, f"{GROUP}.format", "pack-quantized"),
    (W8A8, f"{GROUP}.output_activations", {"num_bits": 8}),
    (W8A8, f"{GROUP}.weights", None),
    (W8A8, f"{GROUP}.weights.num_bits", 4),
    (W8A8, f"{GROUP}.weights.type", "float"),
    (W8A8, f"{GROUP}.weights.symmetric", False),
    (W8A8, f"{GROUP}.weights.strategy", "group"),
    (W8A8, f"{GROUP}.weights.actorder", "group"),
    (W8A8, f"{GROUP}.input_activations", None),
    (W8A8, f"{GROUP}.input_activations.dynamic", False),
    (W8A8, f"{GROUP}.input_activations.strategy", "tensor"),
    (W8A8, f"{GROUP}.input_activations.symmetric", False),
    (W8A8, f"{GROUP}.input_activations.num_bits", 4),
    (GPTQ, "bits", 3),
    (GPTQ, "bits", 8),
    (GPTQ, "bits", None),
    (GPTQ, "bits", "4"),
    (GPTQ, "group_size", 16),
    (GPTQ, "group_size", 1024),
    (GPTQ, "group_size", True),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "dynamic", {"-:.*down.*": {}}),
    (GPTQ, "pack_dtype", "int16"),
    (GPTQ, "desc_act", "true"),
    (AWQ, "bits", 8),
    (AWQ, "version", "gemv"),
    (AWQ, "version", "marlin"),
    (AWQ, "zero_point", False),
    (AWQ, "group_size", 16),
]


@pytest.fixture(scope="module")
def packed_path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("packed"), GPTQ, four_bits(GPTQ))[0]


@pytest.mark.parametrize(("config", "key", "value"), REFUSED, ids=str)
def test_unsupported_settings_are_named(packed_path, config, key, value):
    changed = _with(config, key, value)
    edit_json(packed_path / "config.json", lambda c: c.update(quantization_config=changed))
    with pytest.raises(ModelLoadError) as caught:
        read_spec(packed_path)
    assert key in str(caught.value)
    assert str(caught.value).count("quant_method") == 1
    assert "quantization_config" in str(caught.value)


def test_a_config_that_is_no_object_and_conv_weights_are_refused(packed_path, tmp_path):
    edit_json(packed_path / "config.json", lambda c: c.update(quantization_config="int8"))
    with pytest.raises(ModelLoadError, match="must be an object"):
        read_spec(packed_path)
    shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2")
    edit_json(tmp_path / "gpt2" / "config.json", lambda c: c.update(quantization_config=GPTQ))
    with pytest.raises(ModelLoadError, match=r"quantization_config.*gptq.*model_type"):
        read_spec(tmp_path / "gpt2")


def _shuffle(tensors: Tensors, name: str) -> None:
    size = len(tensors[f"{name}.g_idx"])
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][torch.randperm(size)]


def _scale(tensors: Tensors, name: str, value: float) -> None:
    """One of a tensor's scales, which are made fp32 to hold it."""
    tensors[name] = tensors[name].float()
    tensors[name][0, 0] = value


Q, K, OUT, DOWN = LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[6]
DAMAGES: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("gptq", lambda t: t.pop(f"{OUT}.scales"), f"{OUT}.scales is missing"),
    ("gptq", lambda t: t.pop(f"{OUT}.qweight"), f"(or {OUT}.qweight) is missing"),
    ("gptq", lambda t: t.pop(f"{Q}.qweight"), f"{Q} is not quantized"),
    (
        "gptq",
        lambda t: t.update({f"{OUT}.qzeros": t[f"{OUT}.qzeros"][:1].clone()}),
        "qzeros has shape",
    ),
    ("gptq", lambda t: t.update({f"{OUT}.qweight": t[f"{OUT}.qweight"].long()}), "type I64"),
    ("gptq", lambda t: t[f"{OUT}.scales"].fill_(float("nan")), f"{OUT}.scales holds NaN"),
    ("gptq", lambda t: t[f"{OUT}.scales"].zero_(), f"{OUT}.scales holds only zeros"),
    ("gptq", lambda t: _scale(t, f"{OUT}.scales", 3e38), f"{OUT}.scales holds a scale of 3e+38"),
    ("awq", lambda t: _scale(t, f"{K}.scales", -65505.0), f"{K}.scales holds a scale of 6.55e+04"),
    ("w8a8", lambda t: t[f"{OUT}.weight_scale"].zero_(), "weight_scale holds only zeros"),
    ("w8a8", lambda t: _scale(t, f"{K}.weight_scale", 3e38), f"{K}.weight_scale holds a scale"),
    ("gptq", lambda t: t[f"{OUT}.g_idx"].fill_(0), f"{OUT}.g_idx does not give"),
    ("gptq", lambda t: t[f"{OUT}.g_idx"].fill_(-1), f"{OUT}.g_idx does not give"),
    ("gptq", lambda t: _shuffle(t, K), f"{K}.g_idx differs"),
    ("gptq-order", lambda t: t.pop(f"{OUT}.g_idx"), f"{OUT}.g_idx is missing"),
    ("awq", lambda t: t.pop(f"{DOWN}.qzeros"), f"{DOWN}.qzeros is missing"),
    ("awq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].int()}), "type I32"),
    ("w8a8", lambda t: t.update({f"{OUT}.weight": t[f"{OUT}.weight"].int()}), "type I32"),
    ("w8a8", lambda t: t.pop(f"{OUT}.weight_scale"), "type I8"),
    ("w8a8", lambda t: t.update({f"{OUT}.weight_scale": torch.ones(3)}), "weight_scale has shape"),
]


@pytest.mark.parametrize(("case", "damage", "named"), DAMAGES)
def test_damaged_tensors_are_named(case, damage, named, tmp_path):
    packed, _ = write(tmp_path, *CASES[case])
    tensors = load_file(packed / "model.safetensors")
    damage(tensors)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
    assert named in str(caught.value)


# Tensors that writers put everywhere, as zeros where they mean nothing.
OTHERS: list[tuple[str, str, Tensor]] = [
    ("gptq", f"{OUT}.bias", torch.ones(64, dtype=torch.float16)),
    ("gptq", f"{Q}.bias", torch.ones(64, dtype=torch.float16)),
    ("awq", f"{DOWN}.g_idx", torch.ones(96, dtype=torch.int32)),
    ("w8a8", f"{OUT}.weight_zero_point", torch.ones(64, 1, dtype=torch.int8)),
    ("w8a8", f"{DOWN}.input_scale", torch.full((1,), 0.02, dtype=torch.bfloat16)),
    ("w8a8", f"{DOWN}.input_scale", torch.ones(1).to(torch.float8_e4m3fn)),
    ("w8a8", f"{Q}.lora_A.weight", torch.ones(2, 64)),
    ("w8a8", "lm_head.bias", torch.ones(320)),
    ("w8a8", "model.norm.bias", torch.ones(64)),
]


@pytest.mark.parametrize(("case", "name", "value"), OTHERS)
def test_a_tensor_that_would_change_the_numbers_is_not_dropped(case, name, value, tmp_path, caplog):
    """It was, with a line in the log; one of zeros changes nothing and needs no line."""
    packed, _ = write(tmp_path, *CASES[case])
    tensors = load_file(packed / "model.safetensors")
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    save_file(tensors | {name: torch.zeros_like(value)}, packed / "model.safetensors")
    load_model(packed, **settings)
    assert "not used" not in caplog.text
    save_file(tensors | {name: value}, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{name} is not zero"):
        load_model(packed, **settings)


def test_an_order_is_needed_only_where_config_asks_for_one(tmp_path):
    """And where all inputs share a group, it says nothing."""
    channel = GPTQ | {"group_size": -1}
    for config, shown in ((GPTQ, GPTQ), (channel, channel | {"desc_act": True})):
        packed, _ = write(tmp_path / str(shown["group_size"]), shown, four_bits(config))
        tensors = load_file(packed / "model.safetensors")
        without = {name: t for name, t in tensors.items() if not name.endswith("g_idx")}
        save_file(without, packed / "model.safetensors")
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))


def test_groups_that_do_not_divide_a_layer_are_refused(tmp_path):
    packed, _ = write(tmp_path, GPTQ, four_bits(GPTQ))
    config = GPTQ | {"group_size": 64}  # the MLP has 96 inputs
    edit_json(packed / "config.json", lambda c: c.update(quantization_config=config))
    with pytest.raises(ModelLoadError, match="96 inputs cannot be divided by 64"):
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
