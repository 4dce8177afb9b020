"""A GGUF file is served through a small directory in the user's cache."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from serve.config import EngineConfig
from serve.errors import ModelLoadError
from serve.models import read_spec
from serve.models.open_checkpoint import files_of, open_checkpoint
from serve.single_file import directory
from serve.single_file.config import directory_of, with_directory
from serve.single_file.directory import single_file
from tests.support.gguf.cases import find_case, original
from tests.support.gguf.writer import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mergestep" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    case = find_case("llama-llama3")
    return write_gguf(original(case), tmp_path / "tiny.gguf", case.family)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_made_once_and_only_this_user_reads_it(file: Path, cache: Path) -> None:
    made = directory_of(file)
    assert made.parent == cache and mode(cache) == 0o700 and mode(made) == 0o700
    assert {item.name for item in made.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "gguf.json",
    }
    status = (made / "config.json").stat()
    assert directory_of(file) == made
    assert (made / "config.json").stat().st_ino == status.st_ino
    assert files_of(made) == [file]
    assert [item.name for item in cache.iterdir()] == [made.name]


def test_it_has_the_model_s_values(file: Path) -> None:
    made = directory_of(file)
    spec = read_spec(made)
    source = read_spec(original(find_case("llama-llama3")))
    assert spec.layers[0].mlp == source.layers[0].mlp
    assert (spec.vocab_size, spec.max_model_len) == (source.vocab_size, source.max_model_len)
    assert spec.eos_token_ids == (1,) and spec.bos_token_id == 0
    assert len(open_checkpoint(made, spec).entries) == 2 * 9 + 3
    assert "chat_template" in json.loads((made / "tokenizer_config.json").read_text())


def test_a_changed_file_has_another_directory(file: Path) -> None:
    made = directory_of(file)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf has changed since"):
        files_of(made)
    assert directory_of(file) != made


def test_a_file_that_is_gone_is_named(file: Path) -> None:
    made = directory_of(file)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf.*No such file"):
        files_of(made)


def test_a_failure_leaves_nothing_behind(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_pointer", fail)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: .*No space left"):
        directory_of(file)
    assert list(cache.iterdir()) == []


def test_the_cache_of_another_user_is_not_used(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ModelLoadError, match="not this user's folder"):
        directory_of(file)


def test_an_open_cache_is_closed(file: Path, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    directory_of(file)
    assert mode(cache) == 0o700


def test_directories_that_nobody_uses_are_removed(file: Path, cache: Path) -> None:
    old, new = cache / "old-1", cache / "new-1"
    for folder in (old, new):
        folder.mkdir(parents=True)
    month_ago = time.time() - directory._KEPT_S - 60
    os.utime(old, (month_ago, month_ago))
    directory_of(file)
    assert not old.exists() and new.exists()


def test_a_directory_with_one_file_is_that_model(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(file, folder / "only.gguf")
    (folder / "mmproj-only.gguf").write_bytes(b"the vision part")
    found = single_file(folder)
    assert found is not None and found.name == "only"
    shutil.copy(file, folder / "second.gguf")
    with pytest.raises(ModelLoadError, match=r"has 2 models; .*: only\.gguf, second\.gguf"):
        single_file(folder)


def test_a_directory_with_safetensors_stays_as_it_is(file: Path, tmp_path: Path) -> None:
    source = original(find_case("llama-llama3"))
    folder = tmp_path / "both"
    shutil.copytree(source, folder)
    shutil.copy(file, folder)
    assert single_file(folder) is None and single_file(source) is None
    assert single_file(tmp_path / "nothing") is None


def test_settings_take_the_directory_and_the_file_s_name(file: Path) -> None:
    config = with_directory(EngineConfig(str(file)))
    assert config.model_path == directory_of(file) and config.model_name == "tiny"
    assert with_directory(config) == config
    named = with_directory(EngineConfig(str(file), served_model_name="mine"))
    assert named.model_name == "mine"
    assert with_directory(EngineConfig()) == EngineConfig()


def test_what_is_wrong_with_a_tokenizer_is_said(tmp_path: Path) -> None:
    case = find_case("llama-llama3")
    file = write_gguf(original(case), tmp_path / "odd.gguf", case.family, pre="unheard-of")
    with pytest.raises(ModelLoadError, match=r"odd\.gguf: .*unheard-of.*tokenizer"):
        directory_of(file)
    assert single_file(file, has_tokenizer=True) is not None
