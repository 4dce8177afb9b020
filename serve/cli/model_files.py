"""Finds the model that a command names, and fetches models from the hub for `serve pull`."""

from __future__ import annotations

from serve.cli.reporting import note
from serve.errors import ConfigError
from serve.hub.find import ModelLocation, find

_RANDOM = "random:"


def find_model(model: str, *, revision: str | None = None, is_quiet: bool = False) -> ModelLocation:
    """Finds a directory, a GGUF file or a model of the Hugging Face cache, or fetches it by its
    name on the hub and says so.

    "random:SHAPE" is a checkpoint with random weights, as `serve bench` makes it. revision: of a
    name on the hub. is_quiet: shows no progress. ModelLoadError and ConfigError suggest similar
    names.
    """
    if model.startswith(_RANDOM) and revision is None:
        from bench.common.checkpoints import model_directory

        return ModelLocation(str(model_directory(model)))
    return find(model, revision=revision, tell=note, is_quiet=is_quiet)


def pull_model(model: str, *, revision: str | None, is_quiet: bool) -> str:
    """Fetches a model by its name on the hub. Returns where it lies: a directory or a GGUF file.

    In offline mode it must be in the cache. ConfigError for a text that is no name; DownloadError.
    """
    from serve.hub.cache import cached
    from serve.hub.name import check_revision, parse_name
    from serve.hub.pull import pull
    from serve.hub.settings import read_settings

    name = parse_name(model)
    if name is None:
        raise ConfigError(
            f"model {model!r} is not the name of a model on the hub: ORG/NAME, ORG/NAME:QUANT or"
            " ORG/NAME:FILE.gguf"
        )
    if revision is not None:
        check_revision(revision)
    settings = read_settings()
    if settings.is_offline and (found := cached(name, revision)) is not None:
        return str(found)
    tell = (lambda _: None) if is_quiet else note
    return str(pull(name, settings, revision=revision, tell=tell, is_quiet=is_quiet))
