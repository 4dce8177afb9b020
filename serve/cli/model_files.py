"""Finds models on this machine, in directories and in the Hugging Face cache.

Only file names are read: no checkpoint is opened and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import NamedTuple

from serve.config import DEFAULT_MODEL
from serve.errors import ModelLoadError
from serve.regular_file import open_regular
from serve.single_file.find import SUFFIX, gguf_files

_RANDOM = "random:"
_PREFIX = "models--"
_MAX_FOLDERS = 10_000
_MAX_REF_BYTES = 1024


class ModelLocation(NamedTuple):
    """Where a model lies. model: the value for EngineConfig. name: the model's name in the cache,
    if it is there."""

    model: str
    name: str | None = None


def find_model(model: str) -> ModelLocation:
    """Finds a directory, or else a model of the cache by its name, "org/name" or "name".

    "random:SHAPE" is a checkpoint with random weights, as `serve bench` makes it. ModelLoadError
    and ConfigError suggest similar names.
    """
    if model.startswith(_RANDOM):
        from bench.common.checkpoints import model_directory

        return ModelLocation(str(model_directory(model)))
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL or path.exists():
        return ModelLocation(model if model == DEFAULT_MODEL else str(path))
    cached = cached_models()
    if model in cached:
        return ModelLocation(str(cached[model]), model)
    same = [name for name in cached if name.rpartition("/")[2] == model]
    if len(same) == 1:
        return ModelLocation(str(cached[same[0]]), same[0])
    if same:
        raise ModelLoadError(f"model {model} is ambiguous: it could be {' or '.join(sorted(same))}")
    raise ModelLoadError(
        f"model directory {path} does not exist (models are not downloaded)"
        + _suggestion(model, path, list(cached))
    )


def cached_models() -> dict[str, Path]:
    """Returns the directories of the cached models with a config.json, by sorted name."""
    models = {}
    for folder in _folders(cache_folder()):
        snapshot = _snapshot(folder) if folder.name.startswith(_PREFIX) else None
        if snapshot is not None:
            models[folder.name.removeprefix(_PREFIX).replace("--", "/")] = snapshot
    return dict(sorted(models.items()))


def cache_folder() -> Path:
    """Returns the cache directory, found as Hugging Face's tools find it."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def models_in(folder: Path) -> list[Path]:
    """Returns the folder itself if it holds a model, else its subfolders that do and its GGUF
    files. A GGUF file is its own."""
    if folder.suffix == SUFFIX or (folder / "config.json").is_file():
        return [folder]
    found = [item for item in _folders(folder) if (item / "config.json").is_file()]
    return found + gguf_files(folder)


def _snapshot(folder: Path) -> Path | None:
    """Returns the snapshot that refs/main names, else the latest."""
    try:
        with open_regular(folder / "refs" / "main") as file:
            revision = file.read(_MAX_REF_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    named = folder / "snapshots" / Path(revision or "-").name
    if (named / "config.json").is_file():
        return named
    complete = models_in(folder / "snapshots")
    return max(complete, key=lambda item: item.stat().st_mtime, default=None)


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            names = sorted(item.name for item in entries if item.is_dir())
    except OSError:
        return []
    return [parent / name for name in names[:_MAX_FOLDERS]]


def _suggestion(model: str, path: Path, cached: list[str]) -> str:
    """Suggests similar names in the cache and beside the path."""
    by_key = {name.lower(): name for name in [*cached, DEFAULT_MODEL]}
    by_key |= {name.rpartition("/")[2].lower(): name for name in cached}
    by_key |= {item.name.lower(): str(item) for item in models_in(path.parent)}
    keys = [model.lower(), path.name.lower()]
    matches = [match for key in keys for match in difflib.get_close_matches(key, by_key, n=3)]
    names = list(dict.fromkeys(by_key[match] for match in matches))
    return f"; did you mean {' or '.join(names[:3])}?" if names else ""
