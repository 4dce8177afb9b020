"""A disk that fails, a file that changes and a process that is killed: a clear error or another
try, never a wrong token, and nothing is left over."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from serve.errors import ConfigError, ModelLoadError, WeightsLostError
from serve.loading.streaming import packing
from serve.loading.streaming.reader import MAX_TRIES
from serve.models import Decoder
from serve.models.packed_cache import folder as folders
from tests.support.engine.decoders import run
from tests.support.models.packed_models import IDS, copy_of_model, kept, logits, start
from tests.support.models.streamed import (
    FaultyFile,
    least_budget,
    make_small,
    stream_of,
    streaming,
    use_faulty,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]
FAULTS: list[int | str] = [errno.EIO, "short", "flipped"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


class Rig:
    """A model that streams with the least memory, and its file."""

    def __init__(self, family: str, variant: str, folder: Path) -> None:
        self.path = copy_of_model(family, variant, folder)
        self.want = logits(self.path)
        self.budget = least_budget(self.path)
        self.files: list[FaultyFile] = []
        self.models: list[Decoder] = []

    def open(self, monkeypatch: pytest.MonkeyPatch) -> Decoder:
        self.files = use_faulty(monkeypatch)
        self.models.append(start(self.path, streaming(self.budget)))
        return self.models[-1]

    @property
    def file(self) -> Path:
        (file,) = kept(self.path)
        return file


@pytest.fixture(params=[("llama", "base"), ("qwen3_moe", "head-24")], ids=["layers", "experts"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(*request.param, tmp_path)
    yield made
    for model in made.models:
        stream_of(model).close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("mergestep-io")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_once_is_repeated(
    fault: int | str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rig.open(monkeypatch)
    seen: set[int] = set()

    def once(transfer: object) -> int | str | None:
        offset = getattr(transfer, "offset")  # noqa: B009
        return None if offset in seen else seen.add(offset) or fault

    rig.files[0].fault = once
    for _ in range(3):
        assert torch.equal(run(model, IDS), rig.want)
    stats = stream_of(model).stats()
    assert stats.repeated > 0 and stats.failed == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_fails_again_and_again_is_an_error_and_heals(
    fault: int | str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rig.open(monkeypatch)
    assert torch.equal(run(model, IDS), rig.want)
    rig.files[0].fault = lambda _: fault
    for _ in range(4):
        with pytest.raises(WeightsLostError, match=r"cannot be read from .*\.packed: "):
            run_thrice(model, rig.want)  # what was read before may suffice once
    stats = stream_of(model).stats()
    assert stats.failed > 0 and stats.repeated >= (MAX_TRIES - 1) * stats.failed
    rig.files[0].fault = lambda _: None
    for _ in range(3):
        assert torch.equal(run(model, IDS), rig.want)


def test_one_unit_that_fails_does_not_spoil_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third read fails for good: some passes end in an error, the others are right."""
    model = rig.open(monkeypatch)
    rig.files[0].fault = lambda _: errno.EIO if rig.files[0].num_reads % 3 == 0 else None
    outcomes = [attempt(model) for _ in range(20)]
    assert all(torch.equal(one, rig.want) for one in outcomes if one is not None)
    assert any(one is not None for one in outcomes)


def run_thrice(model: Decoder, want: Tensor) -> None:
    for _ in range(3):
        assert torch.equal(run(model, IDS), want)


def attempt(model: Decoder) -> Tensor | None:
    try:
        return run(model, IDS)
    except WeightsLostError:
        return None


def test_a_file_that_is_replaced_does_not_matter(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rig.open(monkeypatch)
    other = rig.file.with_suffix(".other")
    other.write_bytes(os.urandom(rig.file.stat().st_size))
    other.rename(rig.file)
    for _ in range(3):
        assert torch.equal(run(model, IDS), rig.want)
    rig.file.unlink()
    assert torch.equal(run(model, IDS), rig.want)


@pytest.mark.parametrize("change", ["cut off", "overwritten"])
def test_a_file_that_is_changed_is_noticed(
    change: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rig.open(monkeypatch)
    size = rig.file.stat().st_size
    if change == "cut off":
        os.truncate(rig.file, 4096)
    else:
        with rig.file.open("r+b") as file:
            file.write(os.urandom(size))
    outcomes = [attempt(model) for _ in range(5)]
    assert all(torch.equal(one, rig.want) for one in outcomes if one is not None)
    assert outcomes[-1] is None and stream_of(model).stats().failed > 0


def test_a_damaged_file_is_packed_again_at_the_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = rig.file.read_bytes()
    for damage in (good[:-1], good[: len(good) // 2], good[:-5000] + os.urandom(5000), b""):
        rig.file.write_bytes(damage)
        model = start(rig.path, streaming(rig.budget))
        assert torch.equal(run(model, IDS), rig.want) and rig.file.read_bytes() == good
        stream_of(model).close()


# -- packing


def test_a_full_disk_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("posix_fallocate", "fdatasync"):
        with monkeypatch.context() as patch:
            patch.setattr(packing.os, name, full)
            with pytest.raises(ConfigError, match=r"packed_cache: .*No space left on device"):
                start(path, streaming(1 << 30))
        folder = path / folders.BESIDE
        assert not list(folder.glob(f"*{folders.UNFINISHED}")) and not kept(path)
    monkeypatch.setattr(folders, "_fits", lambda *_: False)
    with pytest.raises(ConfigError, match="packed_cache: weights beyond memory need a file: the"):
        start(path, streaming(1 << 30))


def test_a_folder_that_is_not_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, folder = copy_of_model("llama", "base", tmp_path), tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o1777)
    problem = rf"packed_cache: .* no folder can be used: {folder}: other users can write to it"
    with pytest.raises(ConfigError, match=problem):
        start(path, streaming(1 << 30, folder))


def test_a_checkpoint_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)

    def fail(*_: object) -> None:
        raise ModelLoadError("a tensor is damaged")

    monkeypatch.setattr(packing.PackingTensors, "end", fail)
    with pytest.raises(ModelLoadError, match="a tensor is damaged"):
        start(path, streaming(1 << 30))
    assert not kept(path) and not list((path / folders.BESIDE).glob(f"*{folders.UNFINISHED}"))


KILLED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import serve.loading.streaming.packing as packing
from tests.support.models import packed_models, streamed
def stop(fd):
    print("writing", flush=True)
    time.sleep(60)
packing.os = type("os", (), dict(vars(os), fsync=staticmethod(stop)))
packed_models.start(Path(sys.argv[1]), streamed.streaming(1 << 30))
"""


@pytest.mark.process
def test_a_start_after_kill_9_in_the_middle_of_packing(tmp_path: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    root = str(Path(__file__).parents[4])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), root],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = path / folders.BESIDE
    assert len(list(folder.glob(f"*{folders.UNFINISHED}"))) == 1 and not kept(path)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    model = start(path, streaming(1 << 30))
    assert torch.equal(run(model, IDS), logits(copy))
    assert len(kept(path)) == 1 and not list(folder.glob(f"*{folders.UNFINISHED}"))
    stream_of(model).close()
