"""The cache that Hugging Face's tools share, as far as it concerns models.

A model's folder holds blobs, named by their hashes; snapshots of commits, whose files are links to
blobs; and refs, which say what commit a branch or tag stands for. Only names and sizes of files are
read here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from serve.checkpoint_json import read_json
from serve.errors import ModelLoadError
from serve.hub.name import HubName
from serve.hub.settings import cache_folder
from serve.regular_file import open_regular
from serve.single_file.names import DEFAULT_QUANT, GgufModel, gguf_models, matching, names

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PREFIX = "models--"
_MAX_ENTRIES = 10_000
_MAX_REF_BYTES = 1024
_MAX_FILES = 100_000


class RepoCache(NamedTuple):
    """The folders of one repository below the cache's."""

    folder: Path
    locks: Path

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def make(self) -> None:
        self.blobs.mkdir(parents=True, exist_ok=True)
        self.locks.mkdir(parents=True, exist_ok=True)

    def link(self, commit: str, path: str, digest: str) -> None:
        """Puts a link to a blob into a snapshot, in place of what is there."""
        link = self.snapshot(commit) / path
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(self.blobs / digest, link.parent)
        with contextlib.suppress(OSError):
            if os.readlink(link) == target:
                return
        made = link.with_name(f".{digest[:16]}.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(target)
        os.replace(made, link)

    def set_ref(self, revision: str, commit: str) -> None:
        """Notes the commit of a branch or tag, unless it is noted: the cache may be read-only."""
        if revision == commit or _ref(self.folder, revision) == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        made = ref.with_name(f".{ref.name[:100]}.{os.getpid()}")
        made.write_text(commit)
        os.replace(made, ref)


def repo_cache(cache: Path, repository: str) -> RepoCache:
    name = PREFIX + repository.replace("/", "--")
    return RepoCache(cache / name, cache / ".locks" / name)


def cached_models() -> dict[str, Path]:
    """Returns the models of the cache by sorted name: directories with a config.json as "org/name",
    and GGUF files, in several parts the first one, as "org/name:QUANT"."""
    models = {}
    for folder in _folders(cache_folder()):
        if not folder.name.startswith(PREFIX):
            continue
        name = folder.name.removeprefix(PREFIX).replace("--", "/")
        snapshot = _snapshot(folder)
        if snapshot is not None:
            models[name] = snapshot
        for label, path in _gguf_files(folder).items():
            models[f"{name}:{label}"] = path
    return dict(sorted(models.items()))


def cached(name: HubName, revision: str | None = None) -> Path | None:
    """Returns the directory or the first GGUF file of a model that is wholly in the cache, at the
    commit that a revision stood for when it was fetched."""
    folder = repo_cache(cache_folder(), name.repository).folder
    snapshot = _snapshot(folder) if revision is None else _at_revision(folder, revision)
    if name.choice is None and snapshot is not None and is_complete(snapshot):
        return snapshot
    roots = _roots(folder) if revision is None else [_at_revision(folder, revision)]
    for root in roots:
        models = [] if root is None else _whole_models(root)
        found = matching(models, name.choice or DEFAULT_QUANT)
        if name.choice is None and not found and len(models) == 1:
            found = models
        if root is not None and len(found) == 1:
            return root / found[0].paths[0]
    return None


def is_complete(snapshot: Path) -> bool:
    """Returns whether a directory has its configuration and its weights: other tools fetch files
    one by one."""
    if not (snapshot / CONFIG).is_file():
        return False
    if not (snapshot / INDEX).is_file():
        return any(path.is_file() for path in snapshot.glob("*.safetensors"))
    try:
        weight_map = read_json(snapshot / INDEX).get("weight_map")
    except ModelLoadError:
        return False
    if not isinstance(weight_map, dict):
        return False
    paths = {path if isinstance(path, str) else "" for path in weight_map.values()}
    return all((snapshot / path).is_file() for path in paths)


def models_in(folder: Path) -> list[Path]:
    """Returns the folder itself if it is a model, else its subfolders that are and the GGUF files
    in it, of those in several parts the first one."""
    if (folder / CONFIG).is_file():
        return [folder]
    files = {path.name: path.stat().st_size for path in _files(folder) if path.suffix == ".gguf"}
    gguf = [folder / model.paths[0] for model in gguf_models(files) if model.is_whole]
    return [item for item in _folders(folder) if (item / CONFIG).is_file()] + gguf


def gguf_model(path: Path) -> GgufModel:
    """Returns the model whose first file this is, as far as names and sizes tell it."""
    files = {item.name: item.stat().st_size for item in _files(path.parent)}
    found = matching(gguf_models(files), path.name)
    return found[0] if found else GgufModel("", (path.name,), path.stat().st_size)


def _snapshot(folder: Path) -> Path | None:
    """Returns the snapshot of refs/main, else the latest, among those with a config.json."""
    named = _at_revision(folder, "main")
    if named is not None and (named / CONFIG).is_file():
        return named
    complete = [item for item in _folders(folder / "snapshots") if (item / CONFIG).is_file()]
    return max(complete, key=_changed_s, default=None)


def _roots(folder: Path) -> list[Path]:
    """Returns all snapshots: that of refs/main, then the latest ones first."""
    main = _at_revision(folder, "main")
    others = sorted(_folders(folder / "snapshots"), key=_changed_s, reverse=True)
    return ([main] if main is not None else []) + [item for item in others if item != main]


def _at_revision(folder: Path, revision: str) -> Path | None:
    """Returns the snapshot of a branch, a tag or a commit if there is one."""
    commit = _ref(folder, revision) or revision
    snapshot = folder / "snapshots" / Path(commit).name
    return snapshot if snapshot.is_dir() else None


def _ref(folder: Path, revision: str) -> str:
    """Returns the commit that is noted for a branch or tag, and "" where none is."""
    try:
        with open_regular(folder / "refs" / revision) as file:
            return file.read(_MAX_REF_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _gguf_files(folder: Path) -> dict[str, Path]:
    """Returns the whole GGUF models of all snapshots: their first files by quantization."""
    found: dict[str, Path] = {}
    for root in _roots(folder):
        for label, model in names(_whole_models(root)).items():
            found.setdefault(label, root / model.paths[0])
    return found


def _whole_models(root: Path) -> list[GgufModel]:
    return [model for model in gguf_models(dict(_gguf_sizes(root))) if model.is_whole]


def _gguf_sizes(root: Path) -> Iterator[tuple[str, int]]:
    """Yields path and size of the GGUF files of a snapshot whose blobs are there."""
    num_files = 0
    for folder, _, files in os.walk(root):
        for name in files:
            num_files += 1
            path = Path(folder, name)
            if num_files <= _MAX_FILES and name.endswith(".gguf") and path.is_file():
                yield path.relative_to(root).as_posix(), path.stat().st_size


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime


def _folders(parent: Path) -> list[Path]:
    return _entries(parent, os.DirEntry.is_dir)


def _files(parent: Path) -> list[Path]:
    return _entries(parent, os.DirEntry.is_file)


def _entries(parent: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            found = sorted(item.name for item in entries if is_wanted(item))
    except OSError:
        return []
    return [parent / name for name in found[:_MAX_ENTRIES]]
