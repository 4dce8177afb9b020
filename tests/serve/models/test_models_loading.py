"""Reading a checkpoint: shards, tied weights, links, progress and logs."""

from __future__ import annotations

import json
import logging
import shutil
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from memory.attention.seam import AttentionLayer
from ops import Fusion, LinearOp, get_backend
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from ops.reference import ReferenceBackend
from serve.errors import ModelLoadError
from serve.models import load_model, read_generation_defaults, read_spec
from serve.models.layers.blocks import MixtureMlp
from serve.models.progress import LoadProgress
from tests.support.engine.checkpoints import (
    checkpoint,
    edit_json,
    reference_logits,
)
from tests.support.engine.child import output_of
from tests.support.engine.decoders import copy_of, edit_tensors, load, run, token_ids

pytestmark = pytest.mark.usefixtures("one_thread")


def test_loading_holds_one_product_at_a_time() -> None:
    """All earlier unpacked weights are freed when a product is packed."""
    alive: list[weakref.ref[Tensor]] = []
    shapes: list[tuple[int, ...]] = []

    def make_linear(parts: Sequence[Tensor], bias: Tensor | None, fusion: Fusion) -> LinearOp:
        assert all(part.dtype == torch.bfloat16 for part in parts)
        assert all(item() is None for item in alive)
        alive.extend(weakref.ref(part) for part in parts)
        shapes.append((sum(len(part) for part in parts), parts[0].shape[1]))
        return lambda x, residual=None: x

    load_model(
        checkpoint("llama", "sharded"),
        dtype=torch.bfloat16,
        backend=ReferenceBackend(),
        make_linear=make_linear,
    )
    layer = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert shapes == [*layer, *layer, *layer, (320, 64)]


def test_sharded_checkpoint_has_several_files() -> None:
    assert len(list(checkpoint("llama", "sharded").glob("*.safetensors"))) > 2


def load_with(progress: LoadProgress) -> None:
    backend = ReferenceBackend()
    load_model(checkpoint("llama"), dtype=torch.float32, backend=backend, progress=progress)


def test_progress_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_with(LoadProgress(is_shown=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    load_with(LoadProgress(is_shown=True))
    drawn = capsys.readouterr().err
    assert drawn.startswith(f"\rloading llama [{'.' * 40}] 0/2 layers")
    assert f"\rloading llama [{'#' * 20}{'.' * 20}] 1/2 layers" in drawn
    assert drawn.endswith("\r\x1b[K")
    monkeypatch.setenv("TERM", "dumb")
    load_with(LoadProgress(is_shown=True))
    assert capsys.readouterr().err == ""


def test_the_loading_can_be_ended_between_layers() -> None:
    calls: list[str] = []

    def check() -> None:
        calls.append("check")
        if len(calls) == 2:
            raise ModelLoadError("enough")

    with pytest.raises(ModelLoadError, match="enough"):
        load_with(LoadProgress(check=check, finish=lambda: calls.append("finish")))
    assert calls == ["check", "check"]
    load_with(LoadProgress(check=check, finish=lambda: calls.append("finish")))
    assert calls[2:] == ["check", "check", "finish"]


def test_tied_model_with_its_own_head_uses_it(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "tied"), tmp_path)
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, lambda tensors: tensors | {"lm_head.weight": embed.flip(0).contiguous()})
    ids = token_ids(10)
    torch.testing.assert_close(
        run(load(path), ids), reference_logits(path, ids), atol=1e-4, rtol=1e-5
    )


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy_of(checkpoint("gpt2"), tmp_path)
    extra = {"transformer.h.0.attn.bias": torch.ones(1), "stray": torch.ones(1)}
    edit_tensors(path, lambda tensors: tensors | extra)
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "1 tensors are not used, such as stray" in caplog.text


def test_huggingface_cache_links_are_followed(tmp_path: Path) -> None:
    """The files of a snapshot are links to ../../blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(checkpoint("llama").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert load(snapshot).spec.model_type == "llama"


def test_links_to_blobs_that_all_models_of_the_cache_share_are_followed(tmp_path: Path) -> None:
    """huggingface_hub 2 puts large files into CACHE/blobs, to which a model's own blobs link."""
    repository, shared = tmp_path / "models--Org--Model", tmp_path / "blobs" / "ab"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "blobs", shared):
        folder.mkdir(parents=True)
    for file in checkpoint("llama").iterdir():
        shutil.copy(file, shared / file.name)
        (repository / "blobs" / file.name).symlink_to(Path("../../blobs/ab") / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load(snapshot).spec.model_type == "llama"
    other = tmp_path / "Org--Model"
    repository.rename(other)
    with pytest.raises(ModelLoadError, match="outside of the model directory"):
        load(other / "snapshots" / "abc")


def test_spec_of_each_family() -> None:
    spec = read_spec(checkpoint("mistral"))
    assert (spec.model_type, spec.torch_dtype) == ("mistral", "float32")
    assert (spec.eos_token_ids, spec.bos_token_id) == ((1,), 0)
    assert spec.attention_layers == [AttentionLayer(4, 2, 16, 16**-0.5, 8)] * 2
    layers = read_spec(checkpoint("qwen2", "old-window")).attention_layers
    assert [layer.window for layer in layers] == [None, 8, 8]
    layers = read_spec(checkpoint("gpt2", "scaled")).attention_layers
    assert layers[2].scale == pytest.approx(12**-0.5 / 3)
    assert read_spec(checkpoint("llama", "yarn")).max_model_len == 256
    assert read_spec(checkpoint("opt", "350m")).embed_size == 24


def test_generation_defaults(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    generation = {"eos_token_id": [7, 9, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_defaults(path) == {
        "eos_token_ids": (7, 9),
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }
    assert read_spec(path).eos_token_ids == (7, 9)
    (path / "generation_config.json").write_text("{}")
    assert read_generation_defaults(path) == {"eos_token_ids": (1,)}
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", lambda config: config.update(eos_token_id=[3, 4]))
    assert read_generation_defaults(path) == {"eos_token_ids": (3, 4)}


@pytest.mark.process
@pytest.mark.row("X10")
def test_changed_files_do_not_affect_a_running_model() -> None:
    root = Path(__file__).parents[3]
    script = root / "tests/support/engine/replaced_model.py"
    output_of(script, *(checkpoint(name) for name in ("llama", "gpt2", "opt")), PYTHONPATH=root)


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_the_gate_of_a_shared_mlp_is_not_rounded() -> None:
    """A gate of one row in 4 bits would change all results of the shared MLP."""
    path = checkpoint("qwen2_moe", "shared")
    make_linear = partial(NATIVE.rounded4, group=32, is_nf4=False)
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    decoder = load_model(path, make_linear=make_linear, make_head=NATIVE.int8, **settings)
    stored = load_file(path / "model.safetensors")["model.layers.1.mlp.shared_expert_gate.weight"]
    mlp = decoder.weights.blocks[1].mlp
    assert isinstance(mlp, MixtureMlp) and mlp.shared_gate is not None
    assert torch.equal(mlp.shared_gate.weight, stored)
