"""`serve models` lists the models on this machine or on a server.

It reads only config.json and the safetensors headers of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from serve.cli.reporting import printable
from serve.config import DEFAULT_MODEL, DTYPES, EngineConfig
from serve.errors import ConfigError, ModelLoadError, reason
from serve.hub.cache import cached_models, gguf_model, models_in
from serve.hub.settings import cache_folder
from serve.loading.footprint import check_weights_fit, footprint, weight_bytes
from serve.loading.precision import Precision, resolve_precision
from serve.models import count_parameters, read_spec
from serve.models.open_checkpoint import open_checkpoint
from serve.models.spec import ModelSpec
from serve.single_file.config import directory_of
from serve.single_file.names import SUFFIX
from serve.text.rank_patterns import find_tokenizer, rules_of
from serve.text.tokenizer_config import optional_json
from serve.units import format_memory, format_parameters


@dataclass(slots=True)
class ServableModel:
    """A model on this machine.

    format: "safetensors", or "GGUF" with the quantization if the file's name tells it. problem: the
    reason why it cannot be served, else "". active_parameters: without the experts that a token
    does not use. size_bytes: those of the weight files. dtype: the choice of "auto".
    dtypes: those that this machine supports; other_dtypes: those that differ from "auto".
    weight_bytes, kv_token_bytes: what weights and a token's K/V take in memory with "auto";
    state_bytes: a sequence's state in layers that have one.
    max_tokens, max_sequences: the longest context that fits into the memory that is free now, and
    how many of that length; 0 if the weights do not fit. lack: what `serve run` then says of the
    weights and of the dtypes that would fit.
    """

    name: str
    path: str
    format: str = "safetensors"
    family: str = ""
    parameters: int = 0
    active_parameters: int = 0
    size_bytes: int = 0
    max_model_len: int = 0
    dtype: str = ""
    dtypes: list[str] = field(default_factory=list)
    other_dtypes: list[str] = field(default_factory=list)
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    state_bytes: int = 0
    max_tokens: int = 0
    max_sequences: int = 0
    lack: str = ""
    problem: str = ""


def list_models(paths: Sequence[Path], tokenizer: str | None = None) -> list[ServableModel]:
    """Returns the models below the paths, which may be GGUF files, or the embedded model and those
    of the cache. tokenizer: the directory of the tokenizer with which they would be served, if it
    is another. Raises ConfigError for a path that is neither a directory nor such a file.
    """
    if not paths:
        embedded = EngineConfig().model_path
        cached = [_describe(name, path, tokenizer) for name, path in cached_models().items()]
        return [_describe(DEFAULT_MODEL, embedded, tokenizer), *cached]
    models = []
    for path in paths:
        if path.suffix == SUFFIX and path.is_file():
            models.append(_describe(str(path), path, tokenizer))
            continue
        try:
            next(path.iterdir(), None)
        except OSError as error:
            raise ConfigError(f"{path}: {reason(error)}") from error
        models += [_describe(str(item), item, tokenizer) for item in models_in(path)]
    return models


def _describe(name: str, path: Path, tokenizer: str | None) -> ServableModel:
    model = ServableModel(name, str(path))
    if path.suffix == SUFFIX:
        found = gguf_model(path)
        model.format, model.size_bytes = f"GGUF {found.quant}".rstrip(), found.size_bytes
    try:
        path = directory_of(path, has_tokenizer=tokenizer is not None)
        spec = read_spec(path)
        model.family = spec.model_type
        counts = count_parameters(spec)
        model.parameters, model.active_parameters = counts.total, counts.active
        model.max_model_len = spec.max_model_len
        checkpoint = open_checkpoint(path, spec)
        files = {entry.file for entry in checkpoint.entries.values()}
        model.size_bytes = sum(file.stat().st_size for file in files)
        config = EngineConfig(str(path), tokenizer=tokenizer)
        _check_tokenizer(config.tokenizer_path)
        precision = resolve_precision(config, spec, is_trial=True)
        dtypes = _dtypes(spec)
        model.dtype, model.dtypes = str(precision), list(dtypes)
        model.other_dtypes = [name for name, found in dtypes.items() if found != precision]
        weights = weight_bytes(config, spec, precision, checkpoint)
        takes = footprint(config, spec, precision, weights)
        model.weight_bytes, model.kv_token_bytes = takes.weight_bytes, takes.kv_token_bytes
        model.state_bytes = takes.state_bytes
        model.max_tokens, model.max_sequences = takes.max_tokens, takes.max_sequences
        model.lack = _lack(config, spec, precision)
    except (ModelLoadError, ConfigError) as error:
        model.problem = str(error)
        for start in (f"{path}/", f"{path}: ", f"{path} "):
            model.problem = model.problem.replace(start, "")
    return model


def _lack(config: EngineConfig, spec: ModelSpec, precision: Precision) -> str:
    try:
        check_weights_fit(config, spec, precision)
    except ConfigError as error:
        return str(error)
    return ""


def _check_tokenizer(path: Path) -> None:
    rules_of(find_tokenizer(path), optional_json(path / "tokenizer_config.json"))


def _dtypes(spec: ModelSpec) -> dict[str, Precision]:
    """Returns all dtypes that are supported, and what each becomes."""
    possible = {}
    for dtype in DTYPES[1:]:
        try:
            found = resolve_precision(EngineConfig(dtype=dtype), spec, is_trial=True)
        except ConfigError:
            continue
        possible[dtype] = found
    return possible


def show_local(paths: Sequence[Path], tokenizer: str | None = None, *, as_json: bool) -> None:
    models = list_models(paths, tokenizer)
    if as_json:
        _print(json.dumps([asdict(model) for model in models], indent=2))
        return
    if not models:
        _print("no models: the directory of a model has a config.json or GGUF files")
        return
    console = Console()
    console.print(_table(models))
    for model in models:
        _print(printable(f"{model.name}: {model.problem or _takes(model)}"))
    if not paths and len(models) == 1:
        _print(f"The Hugging Face cache {cache_folder()} holds no models.")


def _table(models: Iterable[ServableModel]) -> Table:
    names = Column("model", overflow="fold")  # whole, since a user copies them
    others = ("family", "parameters", "size", "context", "auto", "other dtypes")
    table = Table(names, "format", *others)
    for model in models:
        name = Text(printable(model.name))
        if model.problem:
            size = format_memory(model.size_bytes) if model.size_bytes else ""
            no = ("not supported", "see below")
            table.add_row(name, model.format, model.family, "", size, "", *no)
            continue
        table.add_row(
            name,
            model.format,
            model.family,
            format_parameters(model.parameters, model.active_parameters),
            format_memory(model.size_bytes),
            f"{model.max_model_len:,}",
            model.dtype,
            ", ".join(model.other_dtypes),
        )
    return table


def _takes(model: ServableModel) -> str:
    """Returns what a model takes in memory and what fits, for a line of its own."""
    text = f"takes {format_memory(model.weight_bytes)}, and {format_memory(model.kv_token_bytes)}"
    text += " a token"
    if model.state_bytes:
        text += f" and {format_memory(model.state_bytes)} a sequence"
    if model.lack:
        return model.lack
    if not model.max_sequences:
        return f"{text}; the memory that is free now is too small"
    return f"{text}; {model.max_sequences:,} x {model.max_tokens:,} tokens fit now"


async def fetch_models(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Returns the list of a server's /v1/models."""
    from serve.http.client import ApiClient

    async with ApiClient(url, api_key=api_key) as client:
        return await client.models()


def show_served(models: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        _print(json.dumps(models, indent=2))
        return
    has_states = any("state" in model for model in models)  # where several models are served
    table = Table("model", "context", "owned by", *(("state", "memory") if has_states else ()))
    for model in models:
        length, num_bytes = model.get("max_model_len"), model.get("memory_bytes")
        row: list[Text | str] = [
            Text(printable(str(model.get("id")))),
            f"{length:,}" if isinstance(length, int) else "",
            Text(printable(str(model.get("owned_by", "")))),
        ]
        if has_states:
            row.append(Text(printable(str(model.get("state", "")))))
            row.append(format_memory(num_bytes) if isinstance(num_bytes, int) else "")
        table.add_row(*row)
    Console().print(table)


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
