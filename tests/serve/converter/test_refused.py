"""What the converter does not serve is refused with a typed error that names it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from ops.reference import ReferenceBackend
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.converter import model as converter
from serve.converter.capture import find_class
from serve.converter.interface import Mask
from serve.errors import ConfigError, ModelLoadError
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.decoders import copy_of, edit_tensors, run
from tests.support.engine.foreign import foreign
from tests.support.engine.variants.variant import LLAMA

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "nobody"}, "model_type 'nobody' is no causal language model"),
        ({"model_type": "t5"}, "model_type 't5' is no causal language model"),
        ({"model_type": "bart", "d_model": 64}, "an encoder"),
        ({"model_type": "mamba"}, "a state beside K/V"),
        ({"model_type": "bamba"}, "a state beside K/V"),
        ({"model_type": "llama4_text"}, "layer_types|attention_chunk_size"),
        ({"model_type": "bloom"}, "position_ids, which its forward does not take"),
        (
            {"model_type": "helium", "architectures": ["HeliumForSequenceClassification"]},
            "architectures names 'HeliumForSequenceClassification'; .*HeliumForCausalLM",
        ),
        ({"model_type": "helium", "quantization_config": {}}, "quantization_config"),
        ({"model_type": "helium", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "helium", "num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"model_type": "helium", "hidden_size": "wide"}, "transformers refuses it"),
        (
            {"model_type": "helium"}
            | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotations that follow the longest sequence",
        ),
        ({}, "model_type is missing"),
    ],
)
def test_a_class_is_refused_by_name(values, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        find_class(config_of(tmp_path, **values))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "doge"}, "DogeForCausalLM: .*attention mask that it changes"),
        ({"model_type": "codegen", "n_head": 4, "n_embd": 64}, "CodeGenForCausalLM"),
    ],
)
def test_a_graph_is_refused_by_the_name_of_its_class(values, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        converter.export(config_of(tmp_path, **values), torch.float32)


def test_rows_that_depend_on_others_are_refused(monkeypatch):
    """A convolution over the rows of a step would mix requests."""
    exported = converter.export(foreign("helium"), torch.float32)
    forward = converter.ConvertedModel.forward

    def mixing(self, *rows):
        hidden = forward(self, *rows)
        return hidden + hidden.mean(0)

    monkeypatch.setattr(converter.ConvertedModel, "forward", mixing)
    with pytest.raises(ModelLoadError, match="rows that depend on others"):
        converter.load_converted(exported, backend=ReferenceBackend())


@pytest.mark.exhaustive
def test_a_model_with_a_convolution_is_refused(tmp_path):
    import transformers

    config = transformers.Lfm2Config(
        **(LLAMA | {"layer_types": ["conv", "full_attention"], "pad_token_id": 0})
    )
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="layers that keep a state"):
        converter.export(tmp_path, torch.float32)


@pytest.mark.exhaustive
def test_experts_that_are_joined_as_they_are_read_are_refused(tmp_path):
    import transformers

    values = LLAMA | {"num_local_experts": 4, "pad_token_id": 0}
    transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**values)).save_pretrained(tmp_path)
    exported = converter.export(tmp_path, torch.float32)
    with pytest.raises(ModelLoadError, match=r"experts.* is missing; converter does not split"):
        converter.load_converted(exported, backend=ReferenceBackend())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k}, "up_proj.* missing"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"][:5].clone()}, "has shape"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan}, "NaN"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.int8)}, "type I8"),
        (lambda t: t | {"lm_head.bias": torch.ones(320)}, "lm_head.bias is not zero"),
    ],
)
def test_a_wrong_checkpoint_names_the_tensor(change, message, tmp_path):
    path = copy_of(foreign("helium"), tmp_path)
    edit_tensors(path, change)
    exported = converter.export(path, torch.float32)
    with pytest.raises(ModelLoadError, match=message):
        converter.load_converted(exported, backend=ReferenceBackend())


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    path = copy_of(foreign("helium"), tmp_path)
    edit_json(path / "config.json", lambda c: c.update(auto_map={"AutoConfig": "evil.Evil"}))
    (path / "evil.py").write_text("raise SystemExit('the code of the checkpoint was run')")
    with pytest.raises(ModelLoadError, match=r"model_type|auto_map"):
        LLM(str(path))
    with LLM(str(path), converter=True) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_a_gpu_and_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="converter must be true or false"):
        EngineConfig(converter="yes")
    with pytest.raises(ConfigError, match="converter needs the cpu back end"):
        LLM(str(foreign("helium")), converter=True, backend="cuda")


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'pip install "mergestep\[converter\]"'):
        find_class(foreign("helium"))


def test_a_family_with_a_row_is_served_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, "serve.converter"):
        find_class(checkpoint("llama"))
    assert "llama has a row in the table of families" in caplog.text


def test_a_mask_that_is_cut_stays_and_one_that_is_changed_is_refused():
    mask = Mask(16)
    assert mask[:, :, :, :5] is mask
    with pytest.raises(ModelLoadError, match="mask that it changes"):
        mask.to(torch.float32)


def test_a_value_of_all_positions_is_refused(monkeypatch):
    """It would make a row's result depend on its batch, as the largest position does."""
    from transformers.models.helium.modeling_helium import HeliumRotaryEmbedding

    def shifted(self, x, position_ids):
        return forward(self, x, position_ids - position_ids.amax())

    forward = HeliumRotaryEmbedding.forward
    monkeypatch.setattr(HeliumRotaryEmbedding, "forward", shifted)
    with pytest.raises(ModelLoadError, match="a value of the positions of all rows"):
        converter.export(foreign("helium"), torch.float32)


def _with_buffer(monkeypatch, *, is_saved: bool) -> None:
    """Gives the MLPs of Helium a buffer that multiplies their results."""
    from transformers.models.helium.modeling_helium import HeliumMLP

    def init(self, config):
        make(self, config)
        self.register_buffer("gain", torch.ones(1), persistent=is_saved)

    make, forward = HeliumMLP.__init__, HeliumMLP.forward
    monkeypatch.setattr(HeliumMLP, "__init__", init)
    monkeypatch.setattr(HeliumMLP, "forward", lambda self, x: forward(self, x) * self.gain)


def test_a_buffer_that_is_not_computed_is_refused(monkeypatch):
    _with_buffer(monkeypatch, is_saved=False)
    with pytest.raises(ModelLoadError, match="the buffer gain"):
        converter.export(foreign("helium"), torch.float32)


def test_a_buffer_that_is_saved_is_read(monkeypatch, tmp_path):
    _with_buffer(monkeypatch, is_saved=True)
    path = copy_of(foreign("helium"), tmp_path)
    exported = converter.export(path, torch.float32)
    with pytest.raises(ModelLoadError, match="gain is missing"):
        converter.load_converted(exported, backend=ReferenceBackend())
    logits = []
    for gain in (1.0, 3.0):
        names = [f"model.layers.{layer}.mlp.gain" for layer in range(2)]
        edit_tensors(path, lambda t, g=gain, n=names: t | {x: torch.tensor([g]) for x in n})
        model = converter.load_converted(exported, backend=ReferenceBackend())
        logits.append(run(model, [5, 6, 7]))
    assert not torch.allclose(logits[0], logits[1], atol=0.1)
