"""From the settings of `serve run` with several models to the front that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from serve.cluster.models.child import ChildSpec
from serve.cluster.models.listener import FrontModel, FrontPlan, new_key, serve_models
from serve.cluster.models.settings import ModelsSettings
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.http.edge.file_limit import raise_file_limit
from serve.http.edge.settings import HttpSettings
from serve.machine import KV_SHARE_OF_FREE_MEMORY, LOCAL_KV_ENV, available_memory
from serve.units import format_memory

_SHARE_OF_FREE_MEMORY = 0.8
_LEAST_BYTES = 64 << 20
# settings of the listener that clients reach; a model's process is reached by the front alone
_OF_THE_FRONT = (
    *("model", "more_models", "idle_seconds", "memory_budget", "model_wait_s"),
    *("max_model_waiting", "tls_cert", "tls_key", "tls_client_ca", "cors_origins"),
    *("allowed_hosts", "allow_no_key", "revision"),
)
_WEIGHTS = (".safetensors", ".gguf")
MakeFile = Callable[[Mapping[str, Any], Iterable[str]], str]


def run_models(
    models: Sequence[tuple[str, str | None]],
    config: EngineConfig,
    http: HttpSettings,
    settings: ModelsSettings,
    make_file: MakeFile,
    *,
    is_quiet: bool,
) -> None:
    """Serves the models until a signal. models: where each lies, and its name on the hub if it has
    one. make_file: makes the settings of a model's process from changes and names to leave out.

    Raises ConfigError, and OSError for the port.
    """
    raise_file_limit(2 * http.max_connections)  # a connection of a model for each of a client
    budget = settings.memory_budget
    if budget is None:
        _check_device(config)
        budget = int(available_memory() * _SHARE_OF_FREE_MEMORY)
    if budget < _LEAST_BYTES:
        raise ConfigError(f"memory_budget {format_memory(budget)} is too little for any model")
    key = new_key()
    kv_bytes = config.kv_cache_bytes or int(budget * KV_SHARE_OF_FREE_MEMORY / len(models))
    named = name_models(models)
    plan = FrontPlan(
        [
            FrontModel(_spec(name, where, http, make_file, key, kv_bytes), weight_file_bytes(where))
            for name, where in named.items()
        ],
        budget,
        kv_bytes,
        config.dtype,
        key,
    )
    uvloop.run(serve_models(plan, http, settings, is_quiet=is_quiet))


def name_models(models: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """Returns where the models lie by the names that clients use. ConfigError if two have one
    name."""
    named: dict[str, str] = {}
    for where, hub_name in models:
        name = hub_name or _name_of(where)
        if name in named:
            raise ConfigError(
                f"model {where}: {named[name]} has the name {name} too; names must differ"
            )
        named[name] = where
    return named


def _name_of(where: str) -> str:
    if where == DEFAULT_MODEL:
        return EngineConfig().model_name
    path = Path(where).expanduser().absolute()
    return path.stem if path.suffix == ".gguf" else path.name


def weight_file_bytes(where: str) -> int:
    """Returns the bytes of a model's weight files."""
    path = EngineConfig(where).model_path
    if path.is_file():
        parts = path.parent.glob(f"{path.stem.rpartition('-00001-of-')[0]}*.gguf")
        files = list(parts) if "-00001-of-" in path.stem else [path]
    else:
        files = [each for each in path.iterdir() if each.suffix in _WEIGHTS]
    return sum(each.stat().st_size for each in files)


def _check_device(config: EngineConfig) -> None:
    """Refuses to guess on a GPU, whose memory this process does not see."""
    may_be_gpu = config.backend == "cuda" or (
        config.backend == "auto" and Path("/dev/nvidiactl").exists()
    )
    if may_be_gpu:
        raise ConfigError(
            "memory_budget: several models on a GPU need it, and kv_cache_bytes; set both for the"
            " GPU's memory, or --backend cpu"
        )


def _spec(
    name: str, where: str, http: HttpSettings, make_file: MakeFile, key: str, kv_bytes: int
) -> ChildSpec:
    changes = {
        "model": where,
        "served_model_name": name,
        "host": "127.0.0.1",
        "port": 0,
        "quiet": True,
        "enable_sleep_mode": True,
        "max_connections_per_address": http.max_connections,
    }
    keys = ",".join((*http.api_keys, f"mergestep-front:{key}"))
    secrets = {"MERGESTEP_API_KEYS": keys, LOCAL_KV_ENV: str(kv_bytes)}
    return ChildSpec(name, make_file(changes, _OF_THE_FRONT), secrets)
