"""Finds the GGUF file of a model: the path itself, or the only one in a directory."""

from __future__ import annotations

from pathlib import Path

from serve.errors import ModelLoadError
from serve.single_file.names import SUFFIX, gguf_models

_MAX_FILES = 10_000
_MAX_NAMED = 10


def gguf_files(folder: Path) -> list[Path]:
    """Returns the GGUF files of a directory that are a model or the first file of one, by name."""
    try:
        found = sorted(item.name for item in folder.iterdir() if item.suffix == SUFFIX)
    except OSError:
        return []
    files = {name: 0 for name in found[:_MAX_FILES] if (folder / name).is_file()}
    return [folder / model.paths[0] for model in gguf_models(files)]


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file that a path stands for; None if it stands for another model.

    ModelLoadError if it is a directory with several models.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or _has_other_weights(path):
        return None
    found = gguf_files(path)
    if len(found) > 1:
        names = ", ".join(item.name for item in found[:_MAX_NAMED])
        raise ModelLoadError(
            f"{path} has {len(found)} models; name one of its files: {names}"
            + (" and others" if len(found) > _MAX_NAMED else "")
        )
    return found[0] if found else None


def _has_other_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or (path / "gguf.json").exists()
