"""GGUF models that are wrong are refused with the key or the tensor that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ops import get_backend
from ops.cpu.native_quantized_linear import NATIVE
from serve.errors import ModelLoadError
from serve.models import load_model
from serve.models.gguf.architectures import ARCHITECTURES
from serve.single_file.config import directory_of
from tests.support.gguf.cases import find_case, original
from tests.support.gguf.writer import write_gguf

Keys = dict[str, Any]
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(file: Path) -> None:
    import torch

    load_model(
        directory_of(file),
        dtype=torch.float32,
        backend=get_backend("cpu"),
        make_linear=NATIVE.int8,
    )


def changed(folder: Path, name: str, change: Callable[[Keys, Tensors], object]) -> Path:
    """Writes a case with changed keys and tensors."""
    case = find_case(name)
    source = write_gguf(original(case), folder / "source.gguf", case.family)
    reader = gguf.GGUFReader(source)
    keys = {
        field.name: (field.contents(), field.types)
        for field in reader.fields.values()
        if not field.name.startswith("GGUF.")
    }
    values: Keys = {key: value for key, (value, _) in keys.items()}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(values, tensors)
    writer = gguf.GGUFWriter(folder / "changed.gguf", values.pop("general.architecture"))
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = keys[key][1][0] if key in keys and type(value) is type(keys[key][0]) else None
            writer.add_key_value(key, value, kind or gguf.GGUFValueType.get_type(value))
    for tensor_name, data in tensors.items():
        writer.add_tensor(tensor_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "changed.gguf"


def set_key(key: str, value: Any) -> Callable[[Keys, Tensors], object]:
    return lambda keys, tensors: keys.update({key: value})


def drop_key(key: str) -> Callable[[Keys, Tensors], object]:
    return lambda keys, tensors: keys.pop(key)


def drop(name: str) -> Callable[[Keys, Tensors], object]:
    return lambda keys, tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Callable[[Keys, Tensors], object]:
    return lambda keys, tensors: tensors.update({name: np.ones(shape, np.float32)})


WRONG: dict[str, tuple[Callable[[Keys, Tensors], object], str]] = {
    "another architecture": (
        set_key("general.architecture", "mamba"),
        r"general\.architecture 'mamba' is not supported; known: llama, qwen2, ",
    ),
    "no number of layers": (drop_key("llama.block_count"), r"llama\.block_count is missing"),
    "too many layers": (set_key("llama.block_count", 1 << 30), r"llama\.block_count is 1073741824"),
    "one layer too many": (set_key("llama.block_count", 3), r"tensor blk\.2\.\S+ is missing"),
    "one layer too few": (set_key("llama.block_count", 1), r"tensor blk\.1\.\S+ is not known"),
    "a text for a number": (
        set_key("llama.embedding_length", "64"),
        r"llama\.embedding_length must be an integer, not '64'",
    ),
    "another width": (
        set_key("llama.embedding_length", 96),
        r"tensor token_embd\.weight has shape \[320, 64\], but the keys of the file asks? for",
    ),
    "another width of MLPs": (
        set_key("llama.feed_forward_length", 64),
        r"tensor blk\.0\.ffn_gate\.weight has shape \[96, 64\].* asks for \[64, 64\]",
    ),
    "heads that differ": (
        set_key("llama.attention.head_count", [4, 2]),
        r"llama\.attention\.head_count differs between layers",
    ),
    "no heads": (set_key("llama.attention.head_count", 0), r"llama\.attention\.head_count is 0"),
    "too many K/V heads": (
        set_key("llama.attention.head_count_kv", 3),
        r"cannot be divided among 3 key/value heads",
    ),
    "heads that are rotated in part": (
        set_key("llama.rope.dimension_count", 8),
        r"llama\.rope\.dimension_count is 8; only 16 is supported",
    ),
    "NaN": (
        set_key("llama.attention.layer_norm_rms_epsilon", float("nan")),
        r"llama\.attention\.layer_norm_rms_epsilon is nan",
    ),
    "a scaling of positions that is not known": (
        set_key("llama.rope.scaling.type", "magic"),
        r"llama\.rope\.scaling\.type 'magic' is not supported",
    ),
    "a key that is not known": (
        set_key("llama.attention.temperature", 2.0),
        r"llama\.attention\.temperature is not known for this architecture",
    ),
    "another size of the vocabulary": (
        set_key("llama.vocab_size", 300),
        r"llama\.vocab_size says 300 tokens, but tensor token_embd\.weight has 320 rows",
    ),
    "no embedding": (drop("token_embd.weight"), r"tensor token_embd\.weight is missing"),
    "no norm": (drop("output_norm.weight"), r"tensor output_norm\.weight is missing"),
    "no product": (drop("blk.1.attn_v.weight"), r"tensor blk\.1\.attn_v\.weight is missing"),
    "a tensor that is not known": (
        add("blk.0.attn_gate.weight", 64),
        r"tensor blk\.0\.attn_gate\.weight is not known for architecture llama",
    ),
    "one bias of several": (
        add("blk.0.attn_q.bias", 64),
        r"some of attn_q, attn_k, attn_v, attn_output have a bias",
    ),
    "a norm that the model has no use for": (
        add("blk.0.attn_q_norm.weight", 16),
        r"tensor blk\.0\.attn_q_norm\.weight is there, but the keys of the file do not ask for it",
    ),
    "factors of another number": (add("rope_freqs.weight", 5), r"short_factor must list 8 numbers"),
    "a matrix of factors": (
        add("rope_freqs.weight", 2, 8),
        r"tensor rope_freqs\.weight must list at most",
    ),
}


OTHERS: dict[str, tuple[str, Callable[[Keys, Tensors], object], str]] = {
    "an activation without a number": (
        "apertus-llama3",
        drop_key("xielu.beta"),
        r"xielu\.beta is missing",
    ),
    "activations of fewer layers": (
        "apertus-llama3",
        set_key("xielu.alpha_p", [0.5]),
        r"xielu\.alpha_p must list 2 numbers",
    ),
    "weights of experts whose sum is not 1": (
        "afmoe-window",
        set_key("afmoe.expert_weights_norm", False),
        r"afmoe\.expert_weights_norm is not true",
    ),
    "another chunk": (
        "llama4_text-llama3",
        set_key("llama4.attention.sliding_window", 0),
        r"llama4\.attention\.sliding_window is 0; only 8192 is supported",
    ),
    "heads that differ within a kind of layers": (
        "gemma4_text-shared",
        set_key("gemma4.attention.head_count_kv", [2, 2, 1, 2, 2, 2]),
        r"gemma4\.attention\.head_count_kv differs between layers with sliding_attention",
    ),
    "pairs of another speed": (
        "gemma4_text-shared",
        lambda keys, tensors: tensors["rope_freqs.weight"].put(0, 2.0),
        r"rope_freqs\.weight must hold 1 for the pairs that rotate",
    ),
    "no speeds of pairs": (
        "gemma4_text-mixture",
        drop("rope_freqs.weight"),
        r"rope_freqs\.weight is missing",
    ),
    "no embedding of layers": (
        "gemma4_text-shared",
        drop("per_layer_token_embd.weight"),
        r"per_layer_token_embd\.weight is missing",
    ),
    "positions of another context": (
        "gpt2-tied",
        set_key("gpt2.context_length", 128),
        r"position_embd\.weight has shape \[256, 64\]",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_wrong_in_other_architectures_is_named(case: str, tmp_path: Path) -> None:
    name, change, message = OTHERS[case]
    file = changed(tmp_path, name, change)
    with pytest.raises(ModelLoadError, match=message):
        load(file)


def test_joined_products_with_too_few_rows(tmp_path: Path) -> None:
    def change(keys: Keys, tensors: Tensors) -> None:
        for layer in range(2):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)[: -1 - layer]

    file = changed(tmp_path, "llama-llama3", change)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_qkv\.weight has shape \[31, 64\]"):
        load(file)


def test_products_of_layers_that_share_keys_and_values_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints have them, and the conversion keeps them."""

    def change(keys: Keys, tensors: Tensors) -> None:
        for part in ("attn_k", "attn_v", "attn_k_norm"):
            tensors[f"blk.5.{part}.weight"] = tensors[f"blk.2.{part}.weight"]

    load(changed(tmp_path, "gemma4_text-shared", change))


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    file = changed(tmp_path, "llama-llama3", change)
    with pytest.raises(ModelLoadError, match=message) as error:
        load(file)
    assert str(file) in str(error.value) or "config.json" in str(error.value)


def test_experts_of_another_number(tmp_path: Path) -> None:
    file = changed(tmp_path, "qwen3_moe-base", set_key("qwen3moe.expert_count", 5))
    message = r"tensor blk\.0\.ffn_gate_exps\.weight has shape \[6, .*expert_count is 5"
    with pytest.raises(ModelLoadError, match=message):
        load(file)
    file = changed(tmp_path, "qwen3_moe-base", set_key("qwen3moe.expert_count", 1 << 31))
    with pytest.raises(ModelLoadError, match=r"qwen3moe\.expert_count is 2147483648"):
        load(file)


def test_an_unchanged_copy_is_loaded(tmp_path: Path) -> None:
    load(changed(tmp_path, "llama-llama3", lambda keys, tensors: None))
    load(changed(tmp_path, "qwen3_moe-base", lambda keys, tensors: None))


def test_parts_of_other_modalities_and_further_predictions_are_ignored(tmp_path: Path) -> None:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys |= {"glm4moe.nextn_predict_layers": 1, "glm4moe.vision.block_count": 27}
        keys["glm4moe.block_count"] += 1
        tensors["blk.3.nextn.eh_proj.weight"] = np.ones((4, 4), np.float32)
        tensors["v.blk.0.attn_q.weight"] = np.ones((4, 4), np.float32)

    load(changed(tmp_path, "glm4_moe-groups", change))


def test_the_refusal_names_all_architectures(tmp_path: Path) -> None:
    file = changed(tmp_path, "llama-llama3", set_key("general.architecture", "bert"))
    with pytest.raises(ModelLoadError) as error:
        directory_of(file)
    assert all(name in str(error.value) for name in ARCHITECTURES)
