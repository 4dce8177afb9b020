"""Each architecture as llama.cpp's conversion writes it gives the logits of its original, and
quantized weights those of the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops import get_backend
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from serve.models import load_model
from serve.models.gguf.architectures import ARCHITECTURES
from serve.single_file.config import directory_of
from tests.support.engine.decoders import run, token_ids
from tests.support.gguf.cases import CASES, Case, find_case, make, original
from tests.support.gguf.changes import is_gpt2_product
from tests.support.gguf.quantize import dequantize, quantize
from tests.support.gguf.quantized import Choose, packed, plain_copy, read_tensors
from tests.support.gguf.rows import ROWS
from tests.support.gguf.writer import write_gguf

# Kinds with blocks of 256 weights need these sizes.
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
# As in Q4_K_M.
_MIXED = {"v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q6_K", "lm_head": "Q6_K"}
_needs_native = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plain_logits(model: Path) -> Tensor:
    """Returns the logits of a model in fp32, with quantized weights unpacked."""
    backend = get_backend("cpu")
    path = directory_of(model)
    loaded = load_model(path, dtype=torch.float32, backend=backend, unpack=True)
    return run(loaded, token_ids(40))


def packed_logits(model: Path) -> Tensor:
    """Returns the logits of a model with products on rows of int8."""
    path, backend = directory_of(model), get_backend("cpu")
    loaded = load_model(path, dtype=torch.float32, backend=backend, make_linear=NATIVE.int8)
    return run(loaded, token_ids(40))


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def written(case: Case, folder: Path, choose: Choose) -> tuple[Path, Path]:
    """Returns a quantized model as a GGUF file, and a directory with the same numbers."""
    source = (
        original(case) if case in CASES else make(folder / "source", case.family, case.settings)
    )
    weights = packed(source, choose)
    file = write_gguf(source, folder / "model.gguf", case.family, weights)
    return file, plain_copy(source, weights, folder / "plain")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_those_of_the_original(case: Case, tmp_path: Path) -> None:
    file = write_gguf(original(case), tmp_path / "model.gguf", case.family)
    assert relative(plain_logits(file), plain_logits(original(case))) < 1e-5


def test_every_architecture_has_a_case() -> None:
    made = {gguf.MODEL_ARCH_NAMES[ROWS[case.family].arch] for case in CASES}
    # the text models of vision models, whose keys and tensors are those of Qwen 2 and 3
    assert made | {"qwen2vl", "qwen3vl", "qwen3vlmoe"} == set(ARCHITECTURES)


NAMES_OF_JOINED = ["llama-yarn-biases", "glm-biases", "qwen3_moe-base", "gemma4_text-shared"]


# files of the converter's --fuse-qkv and --fuse-gate-up-exps, and of GLM's first checkpoints
@pytest.mark.parametrize("name", NAMES_OF_JOINED)
def test_joined_products_are_their_parts(name: str, tmp_path: Path) -> None:
    case = find_case(name)
    file = write_gguf(original(case), tmp_path / "model.gguf", case.family, is_fused=True)
    found = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert "blk.0.attn_qkv.weight" in found and "blk.0.attn_k.weight" not in found
    assert relative(plain_logits(file), plain_logits(original(case))) < 1e-5


def test_joined_products_are_cut_between_blocks(tmp_path: Path) -> None:
    case = find_case("qwen3_moe-base")
    source = original(case)
    weights = packed(source, choose_of(str(case)))
    file = write_gguf(source, tmp_path / "model.gguf", case.family, weights, is_fused=True)
    plain = plain_copy(source, weights, tmp_path / "plain")
    assert relative(plain_logits(file), plain_logits(plain)) < 1e-5


def test_quantized_products_of_gpt2(tmp_path: Path) -> None:
    """They have their outputs first, unlike plain ones of its checkpoints."""
    source = original(find_case("gpt2-tied"))
    tensors = read_tensors(source)
    rows = {n: quantize("Q8_0", t.t()) for n, t in tensors.items() if is_gpt2_product(n)}
    weights = {name: (torch.from_numpy(data), "Q8_0") for name, data in rows.items()}
    file = write_gguf(source, tmp_path / "model.gguf", "gpt2", weights)
    plain = plain_copy(source, {}, tmp_path / "plain")
    for name, data in rows.items():
        tensors[name] = torch.from_numpy(dequantize("Q8_0", data).copy()).t().contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert relative(plain_logits(file), plain_logits(plain)) < 1e-5


def test_quantized_tables_of_layers_are_looked_up_in_fp16(tmp_path: Path) -> None:
    case = find_case("gemma4_text-shared")
    source = original(case)
    weights = packed(source, lambda name: "Q8_0" if "embed_tokens_per_layer" in name else None)
    assert weights
    file = write_gguf(source, tmp_path / "model.gguf", case.family, weights)
    plain = plain_copy(source, weights, tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    for name in weights:
        tensors[name] = tensors[name].half()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert relative(plain_logits(file), plain_logits(plain)) < 1e-5


def test_temperature_of_mistral4(tmp_path: Path) -> None:
    """Its factor of queries is a key that files may have."""
    case = find_case("mistral4-yarn")
    rope = case.settings["rope_parameters"] | {"llama_4_scaling_beta": 0.3}
    source = make(tmp_path / "source", case.family, case.settings | {"rope_parameters": rope})
    file = write_gguf(source, tmp_path / "model.gguf", case.family)
    assert relative(plain_logits(file), plain_logits(source)) < 1e-5
    assert relative(plain_logits(file), plain_logits(original(case))) > 1e-3


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3_moe-base", "gpt_oss-yarn"])
def test_quantized_weights_are_their_numbers(name: str, tmp_path: Path) -> None:
    file, plain = written(find_case(name), tmp_path, choose_of(name))
    assert relative(plain_logits(file), plain_logits(plain)) < 1e-5


def choose_of(name: str) -> Choose:
    """Experts of gpt-oss cannot be packed before they are transposed."""
    if name.startswith("gpt_oss"):
        return lambda tensor: None if "experts" in tensor or "embed" in tensor else "Q8_0"
    return lambda tensor: None if "embed" in tensor else "Q4_1"


@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied"])
def test_a_quantized_embedding_is_looked_up_in_fp16(is_tied: bool, tmp_path: Path) -> None:
    case = Case("llama", "wide", _WIDE | {"tie_word_embeddings": is_tied})
    file, plain = written(case, tmp_path, kinds_of_q4_k_m)
    # what fp16 changes: the head of a tied model stays exact
    assert relative(plain_logits(file), plain_logits(plain)) < 3e-3
    if not is_tied:
        weights = load_file(plain / "model.safetensors")
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].half()
        save_file(weights, plain / "model.safetensors")
        assert relative(plain_logits(file), plain_logits(plain)) < 1e-5


def kinds_of_q4_k_m(name: str) -> str:
    return next((kind for part, kind in _MIXED.items() if part in name), "Q4_K")


def kinds_of_iq4(name: str) -> str:
    return "IQ4_NL" if "down_proj" in name else "IQ4_XS"


@_needs_native
@pytest.mark.parametrize("choose", [kinds_of_q4_k_m, kinds_of_iq4], ids=["Q4_K_M", "IQ4"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied"])
def test_packed_weights_lose_what_rows_of_int8_lose(
    choose: Choose, is_tied: bool, tmp_path: Path
) -> None:
    """The bound is that of the same numbers with plain weights of 8 bits: 4 bits lose nothing."""
    case = Case("llama", "wide", _WIDE | {"tie_word_embeddings": is_tied})
    file, plain = written(case, tmp_path, choose)
    exact = plain_logits(plain)
    assert relative(packed_logits(file), exact) < 1.2 * relative(packed_logits(plain), exact)
