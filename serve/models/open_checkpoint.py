"""Opens a model's checkpoint: safetensors files, or GGUF files that its directory points to."""

from __future__ import annotations

import hashlib
from pathlib import Path

from serve.errors import ModelLoadError
from serve.models.checkpoint import Checkpoint, weight_files
from serve.models.families import FAMILIES
from serve.models.gguf.pointer import pointed_files
from serve.models.gguf_checkpoint import GGUFCheckpoint
from serve.models.spec import ModelSpec
from serve.models.told_checkpoint import ToldCheckpoint, told_about

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of each file


def open_checkpoint(path: Path, spec: ModelSpec) -> Checkpoint:
    """Opens the checkpoint of a directory, or what a peer has told about its files. ModelLoadError
    says what is wrong with them."""
    if (told := told_about(path)) is not None:
        return ToldCheckpoint(path, told)
    files = pointed_files(path)
    if files:
        return GGUFCheckpoint(files[0], spec.model_type)
    checkpoint = Checkpoint(path)
    if renamed := FAMILIES[spec.model_type].names.renamed:
        checkpoint.rename(renamed)
    return checkpoint


def files_of(path: Path) -> list[Path]:
    """Returns the files with a model's weights. ModelLoadError if one is missing."""
    return list(pointed_files(path)) or weight_files(path)


def has_files(path: Path) -> bool:
    """Returns whether all files with a model's weights are there."""
    try:
        return all(map(Path.is_file, files_of(path)))
    except ModelLoadError:
        return False


def stored_files(path: Path) -> list[Path]:
    """Returns the files with weights that are there, none of which is missed."""
    found = filter(Path.is_file, sorted(path.glob("*.safetensors")))
    return list(pointed_files(path)) or list(found)


def checkpoint_fingerprint(path: Path, *, with_times: bool = True) -> str:
    """Returns a hash of config.json and of the weight files' sizes, times and samples.

    Reading gigabytes at start-up would cost more than the cache saves. A rewritten file counts as
    another one; without times, copies of the files on other machines count as the same. Where a
    peer's table stands for the files, the hash is the peer's.
    """
    if (told := told_about(path)) is not None:
        return f"told {told.fingerprint}" if with_times else told.fingerprint
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in stored_files(path):
        status = file.stat()
        size = status.st_size
        time = status.st_mtime_ns if with_times else ""
        digest.update(f"{file.name} {size} {time} ".encode())
        with file.open("rb") as data:
            for number in range(_NUM_SAMPLES):
                data.seek(size * number // _NUM_SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
