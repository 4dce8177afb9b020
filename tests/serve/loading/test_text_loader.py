"""Tokenizer and chat template load beside the weights, and what is wrong with them ends both."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from serve.config import EngineConfig
from serve.engine import text_loader
from serve.engine.chat_prompt import make_chat_template
from serve.engine.loader import load_engine
from serve.engine.text_loader import TextLoading
from serve.errors import ModelLoadError
from serve.models import ModelSpec
from serve.models.progress import LoadProgress
from serve.text.chat_template import ChatTemplate
from serve.text.tokenizer_config import TextConfig
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.text.trials import start_early


@pytest.fixture
def endless_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(self: LoadProgress, spec: ModelSpec, numbers: Sequence[int]) -> Iterator[int]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)
        yield 0

    monkeypatch.setattr(LoadProgress, "layers", layers)


def no_thread(name: str) -> bool:
    return all(thread.name != name for thread in threading.enumerate())


def test_a_wrong_tokenizer_ends_the_loading_of_weights(
    endless_weights: None, tmp_path: Path
) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    edit_json(path / "tokenizer.json", lambda state: state["model"].update(type="Telepathy"))
    began = time.monotonic()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be used"):
        load_engine(EngineConfig(model=str(path)))
    assert time.monotonic() - began < 10
    assert no_thread("mergestep-compute") and no_thread("mergestep-text")


def test_an_interrupt_ends_the_loading_of_weights(endless_weights: None) -> None:
    """Ctrl-C waited until the whole model was there."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load_engine(EngineConfig(model=str(checkpoint("llama"))))
    assert time.monotonic() - began < 5
    assert no_thread("mergestep-compute")


def test_the_template_of_a_model_whose_weights_are_wrong_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates: list[ChatTemplate | None] = []

    def make(config: TextConfig) -> ChatTemplate | None:
        templates.append(make_chat_template(config))
        return templates[-1]

    start_early(monkeypatch)
    monkeypatch.setattr(text_loader, "make_chat_template", make)
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_engine(EngineConfig(model=str(path)))
    deadline = time.monotonic() + 10
    while not no_thread("mergestep-text"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (template,) = templates
    assert template is not None
    assert template._worker._is_closed and template._worker._child is None


def test_what_is_discarded_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    start_early(monkeypatch)
    loading = TextLoading(checkpoint("llama"))
    text = loading.result()
    assert text.template is not None
    worker = text.template._worker
    assert worker._child is not None
    loading.discard()
    assert worker._is_closed and worker._child is None
