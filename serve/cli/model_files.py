"""Where models are on this machine: folders, and the cache of Hugging Face's tools.

Looks at names only; nothing is downloaded, and no checkpoint is opened.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import NamedTuple

from serve.config import DEFAULT_MODEL
from serve.errors import ModelLoadError

_PREFIX = "models--"
_MAX_FOLDERS = 10_000


class FoundModel(NamedTuple):
    """model: what EngineConfig takes. name: what the cache calls it; None: it has no other name."""

    model: str
    name: str | None = None


def find_model(model: str) -> FoundModel:
    """A folder as it is; else a model of the cache by its name, "org/name" or "name".

    ModelLoadError names what is like it.
    """
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL or path.exists():
        return FoundModel(model if model == DEFAULT_MODEL else str(path))
    cached = cached_models()
    if model in cached:
        return FoundModel(str(cached[model]), model)
    same = [name for name in cached if name.rpartition("/")[2] == model]
    if len(same) == 1:
        return FoundModel(str(cached[same[0]]), same[0])
    if same:
        raise ModelLoadError(f"model {model} could be {' or '.join(sorted(same))}")
    raise ModelLoadError(
        f"model directory {path} does not exist (nothing is downloaded by its name)"
        + _nearest(model, path, list(cached))
    )


def cached_models() -> dict[str, Path]:
    """Names to folders, of what the cache holds with a config.json; sorted."""
    found = {}
    for folder in _folders(cache_folder()):
        snapshot = _snapshot(folder) if folder.name.startswith(_PREFIX) else None
        if snapshot is not None:
            found[folder.name.removeprefix(_PREFIX).replace("--", "/")] = snapshot
    return dict(sorted(found.items()))


def cache_folder() -> Path:
    """As Hugging Face's tools find it."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def models_in(folder: Path) -> list[Path]:
    """The folder itself if it is a model's, else those in it."""
    if (folder / "config.json").is_file():
        return [folder]
    return [item for item in _folders(folder) if (item / "config.json").is_file()]


def _snapshot(folder: Path) -> Path | None:
    """The one that refs/main names, else the latest."""
    try:
        revision = (folder / "refs" / "main").read_text().strip()
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


def _nearest(model: str, path: Path, cached: list[str]) -> str:
    """What the name may have been meant for: of the cache, and beside the path."""
    by_key = {name.lower(): name for name in [*cached, DEFAULT_MODEL]}
    by_key |= {name.rpartition("/")[2].lower(): name for name in cached}
    by_key |= {item.name.lower(): str(item) for item in models_in(path.parent)}
    keys = [model.lower(), path.name.lower()]
    matches = [found for key in keys for found in difflib.get_close_matches(key, by_key, n=3)]
    names = list(dict.fromkeys(by_key[match] for match in matches))
    return f"; did you mean {' or '.join(names[:3])}?" if names else ""
