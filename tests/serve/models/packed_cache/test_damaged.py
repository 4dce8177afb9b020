"""Damaged and outdated files of packed weights are noticed, deleted and made again."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.models.packed_cache import cache as module
from serve.models.packed_cache.layout import DATA_START, PAGE
from tests.support.models.packed_models import (
    cache_for,
    copy_of_model,
    forbid_fetching,
    kept,
    logits,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_of_model("llama", "base", tmp_path)


DAMAGES = {
    "empty": lambda data: b"",
    "only a header": lambda data: data[:PAGE],
    "cut off": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "a bit of the header": lambda data: flipped(data, 20),
    "a bit of the weights": lambda data: flipped(data, DATA_START + 5000),
    "the last bit": lambda data: flipped(data, len(data) - 1),
    "zeros": lambda data: bytes(len(data)),
    "another file": lambda data: os.urandom(len(data)),
}


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(
    damage: str, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = logits(model)
    (file,) = kept(model)
    good = file.read_bytes()
    file.write_bytes(DAMAGES[damage](good))
    assert torch.equal(logits(model), want)
    assert "is not used and deleted" in caplog.text
    assert kept(model) == [file] and file.read_bytes() == good
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(model), want)


def test_every_flipped_byte_is_noticed(model: Path) -> None:
    """A sample of all places; what is between two buffers counts too."""
    want = logits(model)
    (file,) = kept(model)
    good = file.read_bytes()
    numbers = torch.randint(0, 1 << 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    size = len(good) - DATA_START
    places = [n % 200 for n in numbers[:10]] + [DATA_START + n % size for n in numbers]
    for place in places:
        file.write_bytes(flipped(good, place))
        before = file.stat().st_ino
        assert torch.equal(logits(model), want)
        is_padding = (
            place < DATA_START and file.stat().st_ino == before
        )  # unused bytes of the header
        assert is_padding or file.read_bytes() == good, place


def test_an_index_of_another_model_is_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A well-formed file with entries that do not fit, as after an error in this code."""
    other = copy_of_model("qwen3_moe", "head-24", tmp_path / "other")
    logits(other)
    want = logits(model)
    (file,), (wrong,) = kept(model), kept(other)
    shutil.copy(wrong, file)
    monkeypatch.setattr(module, "read_header", partial(_any_identity, module.read_header))
    assert torch.equal(logits(model), want)


def _any_identity(read: object, page: bytes, identity: bytes, size: int) -> object:
    return read(page, page[24:56], size)  # type: ignore[operator]


@pytest.mark.parametrize("change", ["time", "size", "config", "settings", "code"])
def test_another_checkpoint_or_setting_is_packed_again(
    change: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(model)
    (before,) = kept(model)
    weights, config = model / "model.safetensors", model / "config.json"
    cache = cache_for()
    if change == "time":
        os.utime(weights, ns=(0, 1))
    elif change == "size":
        with weights.open("ab") as file:
            file.write(b"")
        os.utime(weights, ns=(0, 2))
    elif change == "config":
        config.write_text(config.read_text() + "\n")
    elif change == "settings":
        cache.settings = "other"
    else:
        monkeypatch.setattr(
            "serve.models.packed_cache.identity._code", lambda: b"other code than before"
        )
    logits(model, cache)
    after = kept(model)
    # another setting has a file of its own; a newer version of the same replaces the older one
    assert len(after) == (2 if change == "settings" else 1)
    assert (before in after) == (change == "settings")
