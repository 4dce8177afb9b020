"""A model that is built from kept packed weights is the model that was loaded."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from serve import read_ahead
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.model_source import _packed_cache, read_source
from serve.models.packed_cache import folder as folders
from serve.models.packed_cache.cache import PackedCache
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


@pytest.mark.parametrize(
    ("family", "variant", "weights"),
    [
        ("llama", "base", "int8"),
        ("llama", "base", "int4"),
        ("llama", "base", "bfloat16"),
        ("llama", "gptq", "int8"),
        ("qwen2", "base", "int8"),
        ("qwen3_moe", "head-24", "int8"),
        ("qwen3_moe", "head-24", "bfloat16"),
        ("deepseek_v3", "yarn", "int8"),
        ("gpt_oss", "yarn", "int8"),
        ("qwen3_next", "odd", "int8"),
        ("kimi_linear", "odd", "bfloat16"),
        ("falcon_h1", "gate", "bfloat16"),
        ("nemotron_h", "latent", "int8"),
    ],
)
def test_the_second_start_has_the_same_bits(
    family: str, variant: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model(family, variant, tmp_path)
    want = logits(path, weights=weights)
    assert len(kept(path)) == 1
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(path, weights=weights), want)


def test_what_cannot_be_kept_is_loaded(tmp_path: Path) -> None:
    """Products with reordered inputs are read from the checkpoint at every start."""
    path = copy_of_model("llama", "gptq-order", tmp_path)
    want = logits(path)
    assert len(kept(path)) == 1
    assert torch.equal(logits(path), want)


def test_files_are_private_and_the_format_is_stable(model: Path) -> None:
    logits(model)
    (file,) = kept(model)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not list(file.parent.glob(f"*{folders.UNFINISHED}"))
    assert file.read_bytes().startswith(b"mergestep packed")


# -- whose files


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_files_of_another_user_are_not_used(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    want = logits(model)
    (file,) = kept(model)
    os.chown(file if what == "file" else file.parent, 12345, 12345)
    assert torch.equal(logits(model), want)
    if what == "file":
        assert file.stat().st_uid == 0, "it was written again"
    else:
        assert len(list((tmp_path / "cache/mergestep/packed").glob("*.packed"))) == 1


@pytest.mark.parametrize("kind", ["open to others", "link", "pipe"])
def test_files_that_others_may_change_are_not_used(kind: str, model: Path, tmp_path: Path) -> None:
    want = logits(model)
    (file,) = kept(model)
    if kind == "open to others":
        file.chmod(0o666)
    elif kind == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
        os.mkfifo(file)
    assert torch.equal(logits(model), want)
    assert stat.S_ISREG(file.lstat().st_mode) and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_gives_way_to_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (model / folders.BESIDE).write_text("in its place")
    want = logits(model)
    (file,) = (tmp_path / "cache/mergestep/packed").glob("*.packed")
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(model), want)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_no_folder_at_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (model / folders.BESIDE).write_text("in its place")
    logits(model)
    assert "not kept" in caplog.text


# -- one writer, and what is left of one that was killed

KILLED = """
import os, sys
from pathlib import Path
import serve.models.packed_cache.writer as writer
sys.path.insert(0, sys.argv[2])
from tests.support.models import packed_models
def stop(fd):
    print("writing", flush=True)
    import time
    time.sleep(60)
writer.os = type("os", (), dict(vars(os), fsync=staticmethod(stop)))
packed_models.start(Path(sys.argv[1]), packed_models.cache_for())
"""


@pytest.mark.process
def test_a_start_after_kill_9_in_the_middle_of_writing_is_right(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(__file__).parents[4])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(model), root],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = model / folders.BESIDE
    assert len(list(folder.glob(f"*{folders.UNFINISHED}"))) == 1 and not kept(model)
    (folder / f"of-other-settings{folders.UNFINISHED}").write_bytes(b"left by another writer")
    want = logits(model, cache_for(folder=model.parent / "elsewhere"))
    assert torch.equal(logits(model), want)
    assert len(kept(model)) == 1 and not list(folder.glob(f"*{folders.UNFINISHED}"))
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(model), want)


def test_one_writer_at_a_time(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second of two that start at once waits for the first, and writes nothing."""
    caplog.set_level(logging.INFO)
    folder = model / folders.BESIDE
    folder.mkdir(mode=0o700)
    results: list[Tensor] = []
    with folders.locked(folder):
        caches = [cache_for(), cache_for()]
        starts = [
            threading.Thread(target=lambda cache=cache: results.append(logits(model, cache)))
            for cache in caches
        ]
        for each in starts:
            each.start()
        starts[0].join(0.5)
        assert starts[0].is_alive() and not list(folder.glob("*.*"))
    for each in starts:
        each.join()
    assert torch.equal(*results) and len(kept(model)) == 1
    assert caplog.text.count("kept in") == 1 and "another process has kept them" in caplog.text


# -- how much


def test_the_oldest_files_go_first(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    logits(model)
    (first,) = kept(model)
    size = first.stat().st_size
    for number in range(3):
        cache = PackedCache(f"test {number}", max_bytes=2 * size + 999, min_bytes=0)
        logits(model, cache)
        for age, file in enumerate(sorted(kept(model), key=lambda f: f.stat().st_mtime_ns)):
            os.utime(file, ns=(age, age))
        assert len(kept(model)) == 2
    assert not first.exists()


def test_a_file_that_is_used_becomes_the_newest(model: Path) -> None:
    logits(model)
    (file,) = kept(model)
    os.utime(file, ns=(1, 1))
    logits(model)
    assert file.stat().st_mtime_ns > 1


def test_a_limit_below_the_weights_keeps_nothing(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits(model, cache_for(max_bytes=1000))
    assert not kept(model) and "packed_cache_bytes (1,000)" in caplog.text


def test_the_disk_is_never_filled(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(model)._replace(free=folders._LEAST_FREE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    logits(model)
    assert not kept(model) and "no room" in caplog.text


def test_small_models_are_not_kept(model: Path) -> None:
    logits(model, PackedCache("test"))
    assert not (model / folders.BESIDE).exists()


def test_an_error_of_the_disk_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    logits(model)
    assert not list((model / folders.BESIDE).glob("*.*")) and "No space left" in caplog.text


# -- settings


def test_settings(model: Path, tmp_path: Path) -> None:
    def cache_of(**settings: object) -> PackedCache | None:
        config = EngineConfig(str(model), backend="cpu", **settings)  # type: ignore[arg-type]
        source = read_source(config)
        return _packed_cache(source.config, source.precision)

    assert cache_of(packed_cache="off") is None
    beside = cache_of()
    assert beside is not None and beside.folder is None
    chosen = cache_of(packed_cache=str(tmp_path), packed_cache_bytes=5, dtype="int8")
    assert chosen is not None and (chosen.folder, chosen.max_bytes) == (tmp_path, 5)
    assert chosen.settings != beside.settings
    for wrong in ("", 3, None):
        with pytest.raises(ConfigError, match="packed_cache"):
            EngineConfig(packed_cache=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="packed_cache_bytes"):
        EngineConfig(packed_cache_bytes=0)


def test_a_chosen_folder_is_the_only_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "a" / "folder"
    want = logits(model, cache_for(folder=chosen))
    assert not kept(model) and len(list(chosen.glob("*.packed"))) == 1
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(model, cache_for(folder=chosen)), want)


def test_a_folder_that_is_not_used_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    problems = {
        "file": "it is no directory",
        "file/below": "Not a directory",
        "link": "it is a link",
        "sticky": "other users can write to it (mode 1777)",
    }
    named = [tmp_path / name for name in problems]
    reasons = "; ".join(f"{tmp_path / name}: {problem}" for name, problem in problems.items())
    with pytest.raises(folders.NoRoom) as raised:
        folders.writable(named)
    assert str(raised.value) == f"no folder can be used: {reasons}"
    assert folders.writable([*named, tmp_path / "new"]) == tmp_path / "new"


def test_a_model_that_cannot_be_kept_is_served_and_the_log_says_why(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    caplog.set_level(logging.INFO)
    logits(model, cache_for(folder=tmp_path / "file"))
    assert f"are not kept: no folder can be used: {tmp_path / 'file'}: it is no" in caplog.text


def test_the_next_start_reads_the_same_file_ahead(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "xdg" / "mergestep" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    want = logits(model, cache_for(records=records))
    (file,) = kept(model)
    for name in (model, model / "model.safetensors"):  # as a GGUF file is named
        read_ahead.begin(name, "auto")
        begun = read_ahead._begun
        assert begun is not None and begun.file[1] == file.stat().st_ino
    forbid_fetching(monkeypatch)
    assert torch.equal(logits(model, cache_for(records=records)), want)
    assert read_ahead._begun is None, "the reader has taken it"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    read_ahead.begin(model, "auto")
    cache = cache_for(records=records)
    cache.settings = "other"
    logits(model, cache)
    assert read_ahead._begun is None, "another file is needed"


def test_files_of_a_model_inside_a_package_belong_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "package" / "model"
    model.mkdir(parents=True)
    beside, cache = folders.folders(model, None)
    assert beside.parent == model and tmp_path / "cache" in cache.parents
    (model.parent / "__init__.py").touch()
    assert folders.folders(model, None) == [cache, beside]
