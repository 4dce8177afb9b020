"""The server process of `serve run`."""

from __future__ import annotations

import os
import time

import uvloop

from serve.cli.log_format import use_format
from serve.cli.model_files import find_model
from serve.cli.run_settings import RunSettings
from serve.cli.start_summary import print_ready
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.engine.engine import Engine
from serve.http.edge.file_limit import raise_file_limit
from serve.http.edge.settings import HttpSettings
from serve.http.server import HttpServer, serve_until_signal
from serve.single_file.config import with_directory

_RANK_VARIABLES = {"WORLD_SIZE", "LWS_GROUP_SIZE"}


def run_server(settings: RunSettings, *, revision: str | None, is_quiet: bool) -> None:
    """Runs a server until a signal. A model of the hub that is not here is downloaded first.

    Raises ConfigError, ModelLoadError, or OSError for the port.
    """
    settings.make(EngineConfig)  # the error names the origin of a wrong value
    http: HttpSettings = settings.make(HttpSettings)
    use_format(http.log_format)
    values = settings.of(EngineConfig)
    if "model" in values or revision is not None:
        model = values.get("model", DEFAULT_MODEL)
        location = find_model(model, revision=revision, is_quiet=is_quiet)
        values["model"] = location.model
        values.setdefault("served_model_name", location.name)
    if _RANK_VARIABLES & os.environ.keys() and _runs_rank(EngineConfig(**values)):
        return
    serve(Engine(progress=not is_quiet, **values), http, is_quiet=is_quiet)


def _runs_rank(config: EngineConfig) -> bool:
    """Runs this process as a rank of a group whose engine is another process; returns False at once
    if it is not."""
    from serve.group.membership import read_membership

    member = read_membership(config)
    if member is None or member.rank == 0:
        return False
    from serve.group.worker_main import run_rank

    run_rank(with_directory(config), member)
    return True


def serve(engine: Engine, settings: HttpSettings, *, is_quiet: bool = False) -> None:
    """Starts the engine and serves it until a signal."""
    use_format(settings.log_format)
    raise_file_limit(settings.max_connections)
    server = HttpServer(engine, settings)

    started_s = time.perf_counter()

    def on_ready(url: str) -> None:
        print_ready(server, engine, time.perf_counter() - started_s, is_quiet=is_quiet)

    async def live() -> None:
        await serve_until_signal(server, on_ready=on_ready)

    uvloop.run(live())
