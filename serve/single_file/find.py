"""Finds the GGUF file of a model: the path itself, or the only one in a directory."""

from __future__ import annotations

import re
from pathlib import Path

from serve.errors import ModelLoadError

SUFFIX = ".gguf"
_PROJECTOR = "mmproj"  # in the names of files with the vision part of a model
_FURTHER = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")
_MAX_FILES = 10_000
_MAX_NAMED = 10
_SPLIT = re.compile(r"-00001-of-\d{5}$")


def gguf_files(folder: Path) -> list[Path]:
    """Returns the GGUF files of a directory that are a model or the first file of one, by name."""
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return []
    return [
        path
        for path in found[:_MAX_FILES]
        if _PROJECTOR not in path.name and not _FURTHER.search(path.name) and path.is_file()
    ]


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


def name_of(file: Path) -> str:
    """Returns the name of the model in a file."""
    return _SPLIT.sub("", file.stem)


def _has_other_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or (path / "gguf.json").exists()
