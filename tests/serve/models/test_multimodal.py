"""Multimodal checkpoints, as Transformers saves them, are served as their language models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from serve.errors import ModelLoadError
from serve.models import read_spec
from tests.support.engine.checkpoints import Json, edit_json, find_variant, randomize, settings_of
from tests.support.engine.decoders import edit_tensors, load, run, token_ids

pytestmark = pytest.mark.usefixtures("one_thread")

_VISION: Json = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LLAMA4_VISION: Json = _VISION | {
    "intermediate_size": 64,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_GEMMA4_VISION: Json = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
# kind of the whole -> class of its configuration, of its model, settings of its vision tower
KINDS: dict[str, tuple[str, str, Json]] = {
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration", _VISION),
    "gemma4": ("Gemma4Config", "Gemma4ForConditionalGeneration", _GEMMA4_VISION),
    "llama4": ("Llama4Config", "Llama4ForConditionalGeneration", _LLAMA4_VISION),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", _VISION | {"head_dim": 8}),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", _VISION),
    "internvl": (
        "InternVLConfig",
        "InternVLForConditionalGeneration",
        _VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
    ),
}
_QWEN_VISION: Json = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 64,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 1,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_QWEN2_VISION: Json = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2}
for _kind, _class in (
    ("qwen2_vl", "Qwen2VL"),
    ("qwen2_5_vl", "Qwen2_5_VL"),
    ("qwen3_vl", "Qwen3VL"),
    ("qwen3_vl_moe", "Qwen3VLMoe"),
    ("qwen3_5", "Qwen3_5"),
    ("qwen3_5_moe", "Qwen3_5Moe"),
):
    _tower = _QWEN2_VISION | {"num_heads": 2} if _kind == "qwen2_vl" else _QWEN_VISION
    KINDS[_kind] = (f"{_class}Config", f"{_class}ForConditionalGeneration", _tower)
KINDS["lfm2_vl"] = ("Lfm2VlConfig", "Lfm2VlForConditionalGeneration", _VISION)
# the text models of Qwen's vision models are theirs with three positions, which are equal in text
SHAPES = {
    "qwen2_vl_text": ("qwen2", "base"),
    "qwen2_5_vl_text": ("qwen2", "base"),
    "qwen3_vl_text": ("qwen3", "base"),
    "qwen3_vl_moe_text": ("qwen3_moe", "head-24"),
}
_MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}
# kind of the whole, family and shape of the language model
CASES = [
    ("gemma3", "gemma3_text", "head-24"),
    ("gemma4", "gemma4_text", "shared"),
    ("gemma4", "gemma4_text", "mixture"),
    ("llama4", "llama4_text", "chunks"),
    ("mistral3", "mistral", "base"),
    ("mistral3", "ministral3", "yarn"),
    ("llava", "llama", "base"),
    ("internvl", "qwen2", "base"),
    ("internvl", "qwen3", "base"),
    ("qwen2_vl", "qwen2_vl_text", "base"),
    ("qwen2_5_vl", "qwen2_5_vl_text", "base"),
    ("qwen3_vl", "qwen3_vl_text", "base"),
    ("qwen3_vl_moe", "qwen3_vl_moe_text", "head-24"),
    ("qwen3_5", "qwen3_5_text", "net"),
    ("qwen3_5_moe", "qwen3_5_moe_text", "net"),
    ("lfm2_vl", "lfm2", "convs"),
]
TOWER = "text only: the vision tower"


def save(directory: Path, kind: str, family: str, shape: str) -> tuple[Path, Any]:
    """Saves a small model of the kind. Returns its path and the model."""
    config_class, model_class, vision = KINDS[kind]
    like, shape = SHAPES.get(family, (family, shape))
    text = settings_of(find_variant(like, shape)) | {"model_type": family}
    if family in SHAPES:
        text |= {"rope_parameters": _MROPE, "head_dim": 16}
    if kind == "gemma4":
        text |= {"pad_token_id": 0}
    if kind == "llava":
        vision = vision | {"model_type": "clip_vision_model", "projection_dim": 16}
    config = getattr(transformers, config_class)(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    model = getattr(transformers, model_class)(config).float().eval()
    randomize(model, seed=5)
    path = directory / f"{kind}-{family}"
    model.save_pretrained(path)
    return path, model


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # in Transformers 5.24 the whole fails on text alone
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize(("kind", "family", "shape"), CASES)
def test_text_is_answered_without_the_tower(
    kind: str, family: str, shape: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = save(tmp_path, kind, family, shape)
    ids = token_ids(40)
    expected = logits(model, ids)
    assert expected.std() > 0.5
    with caplog.at_level(logging.INFO, logger="serve.models.weights"):
        decoder = load(path)
    assert decoder.spec.is_nested
    assert decoder.spec.model_type == family
    assert any(TOWER in record.message for record in caplog.records), caplog.text
    ours = [record for record in caplog.records if record.name.startswith("serve.")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]
    rounding = find_variant(*SHAPES.get(family, (family, shape))).rounding
    torch.testing.assert_close(run(decoder, ids), expected, atol=rounding, rtol=1e-5)


def rename(path: Path, change: Callable[[str], str]) -> None:
    edit_tensors(path, lambda tensors: {change(name): t for name, t in tensors.items()})


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_both_prefixes(prefix: str, tmp_path: Path) -> None:
    """Transformers 4 wrote language_model.model., version 5 writes model.language_model."""
    path, model = save(tmp_path, "mistral3", "mistral", "base")
    ids = token_ids(20)
    stored = next(name for name in load_file(path / "model.safetensors") if "embed_tokens" in name)
    now = stored.removesuffix("embed_tokens.weight")
    head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."

    def change(name: str) -> str:
        if name.startswith(now):
            return prefix + name.removeprefix(now)
        return head + name.rpartition("lm_head.")[2] if "lm_head." in name else name

    rename(path, change)
    names = set(load_file(path / "model.safetensors"))
    assert f"{prefix}embed_tokens.weight" in names
    assert f"{head}weight" in names
    torch.testing.assert_close(run(load(path), ids), logits(model, ids), atol=1e-4, rtol=1e-5)


def test_further_layers_are_named_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers of multi-token prediction stand after the last layer."""
    path, model = save(tmp_path, "mistral3", "mistral", "base")
    file = path / "model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if ".layers.1." in name and "language_model" in name]
    assert last
    further = {name.replace(".layers.1.", ".layers.2."): tensors[name].clone() for name in last}
    save_file(tensors | further, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="serve.models.weights"):
        decoder = load(path)
    (line,) = [r.message for r in caplog.records if "not loaded" in r.message]
    assert "multi-token prediction" in line
    assert "vision tower" in line
    ids = token_ids(10)
    torch.testing.assert_close(run(decoder, ids), logits(model, ids), atol=1e-4, rtol=1e-5)


def test_a_head_of_its_own_is_named_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published Qwen3.5 has the layer of multi-token prediction beside the language model."""
    path, model = save(tmp_path, "qwen3_5", "qwen3_5_text", "odd")
    further = {
        "mtp.fc.weight": torch.ones(48, 96),
        "mtp.layers.0.self_attn.q_proj.weight": torch.ones(4, 48),
    }
    edit_tensors(path, lambda tensors: tensors | further)
    with caplog.at_level(logging.INFO, logger="serve.models.weights"):
        decoder = load(path)
    (line,) = [r.message for r in caplog.records if "not loaded" in r.message]
    assert "the vision tower and the multi-token prediction head are not loaded" in line
    ids = token_ids(10)
    torch.testing.assert_close(run(decoder, ids), logits(model, ids), atol=1e-4, rtol=1e-5)


# -- nested configurations that lie


LIES: list[tuple[str, Callable[[Json], object], str]] = [
    ("no object", lambda c: c.update(text_config=[1]), "text_config must be one object"),
    ("a number", lambda c: c.update(text_config=5), "text_config must be one object"),
    ("two", lambda c: c.update(llm_config=c["text_config"]), "text_config and llm_config must be"),
    (
        "within itself",
        lambda c: c["text_config"].update(text_config={"model_type": "llama"}),
        "text_config holds another nested configuration",
    ),
    (
        "unknown",
        lambda c: c["text_config"].update(model_type="rwkv"),
        "text_config: model_type 'rwkv' is not supported",
    ),
    ("a list", lambda c: c["text_config"].update(model_type=["llama"]), "model_type must be"),
    (
        "wide",
        lambda c: c["text_config"].update(hidden_size=80),
        "embed_tokens.weight has shape [320, 64], but config.json asks for [320, 80]",
    ),
    ("deep", lambda c: c["text_config"].update(num_hidden_layers=3), "layers.2."),
    (
        "narrow",
        lambda c: c["text_config"].update(intermediate_size=95),
        "mlp.gate_proj.weight has shape",
    ),
    (
        "negative",
        lambda c: c["text_config"].update(num_hidden_layers=-1),
        "num_hidden_layers is -1",
    ),
    (
        "vocabulary",
        lambda c: c["text_config"].update(vocab_size=321),
        "vocab_size is 321, the table has 320 rows",
    ),
]


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("nested"), "mistral3", "mistral", "base")[0]


@pytest.mark.parametrize(("change", "message"), [lie[1:] for lie in LIES], ids=[x[0] for x in LIES])
@pytest.mark.row("X6")
def test_a_nested_configuration_that_lies(
    change: Callable[[Json], object], message: str, mistral3: Path, tmp_path: Path
) -> None:
    for file in mistral3.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((mistral3 / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.unlink()
    weights.hardlink_to(mistral3 / "model.safetensors")
    edit_json(tmp_path / "config.json", change)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


def test_the_dtype_of_the_whole_counts(mistral3: Path, tmp_path: Path) -> None:
    config = json.loads((mistral3 / "config.json").read_text())
    config["text_config"].pop("dtype", None)
    config["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).torch_dtype == "bfloat16"
