"""Settings that name a GGUF file, as settings that name its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from serve.config import DEFAULT_MODEL, EngineConfig
from serve.single_file.directory import single_file


def with_directory(config: EngineConfig) -> EngineConfig:
    """Returns the settings with the directory of the model's file, which gives the model its name;
    those of other models as they are. The same for the draft model. ModelLoadError says what is
    wrong with the file."""
    if config.draft_model not in (None, DEFAULT_MODEL):
        draft = directory_of(Path(config.draft_model).expanduser())
        config = replace(config, draft_model=str(draft))
    if config.model == DEFAULT_MODEL:
        return config
    found = single_file(config.model_path, has_tokenizer=config.tokenizer is not None)
    if found is None:
        return config
    name = config.served_model_name or found.name
    return replace(config, model=str(found.directory), served_model_name=name)


def directory_of(path: Path, *, has_tokenizer: bool = False) -> Path:
    """Returns the directory of a model, which may be in a GGUF file. ModelLoadError.
    has_tokenizer: as in single_file."""
    found = single_file(path, has_tokenizer=has_tokenizer)
    return path if found is None else found.directory
