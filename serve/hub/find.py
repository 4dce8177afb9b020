"""Finds a model by a path or a name: on this machine, else on the hub."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError, DownloadError, ModelLoadError
from serve.hub.cache import cached, cached_models, models_in
from serve.hub.name import HubName, check_revision, parse_name


class ModelLocation(NamedTuple):
    """Where a model lies. model: the value for EngineConfig, a directory or a GGUF file.
    name: the model's name on the hub, if it is in the cache."""

    model: str
    name: str | None = None


def find(
    model: str,
    *,
    revision: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    is_quiet: bool = False,
) -> ModelLocation:
    """Finds a directory or file, else a model of the cache by "org/name", "org/name:QUANT",
    "org/name:FILE" or the part after the slash, else fetches "org/name" from the hub.

    revision: of a name, a branch, tag or commit. tell: is told what is fetched, if anything is.
    A model that is in the cache is found without the network. ModelLoadError and its DownloadError
    suggest similar names.
    """
    path = Path(model).expanduser()
    name = parse_name(model)
    if revision is not None:
        check_revision(revision)
        if name is None or path.exists():
            raise ConfigError(
                f"revision {revision}: only models by their names on the hub have revisions, and"
                f" {model} is none"
            )
    if model == DEFAULT_MODEL or path.exists():
        return ModelLocation(model if model == DEFAULT_MODEL else str(path))
    if name is None:
        return _by_last_part(model, path)
    found = cached(name, revision)
    if found is None:
        found = _fetched(name, revision, tell, is_quiet, path)
    return ModelLocation(str(found), model)


def _by_last_part(model: str, path: Path) -> ModelLocation:
    models = cached_models()
    same = [name for name in models if name.rpartition("/")[2] == model]
    if len(same) == 1:
        return ModelLocation(str(models[same[0]]), same[0])
    if same:
        raise ModelLoadError(f"model {model} is ambiguous: it could be {' or '.join(sorted(same))}")
    raise ModelLoadError(
        f"model directory {path} does not exist (models are downloaded by their names, as ORG/NAME)"
        + _suggestion(model, path, list(models))
    )


def _fetched(
    name: HubName,
    revision: str | None,
    tell: Callable[[str], None],
    is_quiet: bool,
    path: Path,
) -> Path:
    from serve.hub.pull import pull
    from serve.hub.settings import read_settings

    try:
        return pull(name, read_settings(), revision=revision, tell=tell, is_quiet=is_quiet)
    except DownloadError as error:
        if error.code not in ("not_found", "offline", "network"):
            raise
        hint = _suggestion(str(name), path, list(cached_models()))
        raise DownloadError(
            f"{path} does not exist here, and {error}{hint}", code=error.code
        ) from error


def _suggestion(model: str, path: Path, cached: list[str]) -> str:
    """Suggests similar names in the cache and beside the path."""
    by_key = {name.lower(): name for name in [*cached, DEFAULT_MODEL]}
    by_key |= {name.rpartition("/")[2].lower(): name for name in cached}
    by_key |= {item.name.lower(): str(item) for item in models_in(path.parent)}
    keys = [model.lower(), path.name.lower()]
    matches = [match for key in keys for match in difflib.get_close_matches(key, by_key, n=3)]
    names = list(dict.fromkeys(by_key[match] for match in matches))
    return f"; did you mean {' or '.join(names[:3])}?" if names else ""
