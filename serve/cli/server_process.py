"""The server process of `serve run`."""

from __future__ import annotations

import logging
import os
import resource
import time

import uvloop

from serve.cli.log_format import use_format
from serve.cli.model_files import find_model
from serve.cli.run_settings import RunSettings
from serve.cli.start_summary import print_ready
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.http.edge.settings import HttpSettings
from serve.http.server import HttpServer, serve_until_signal

MAX_FILES = 65_536


def run_server(settings: RunSettings, *, is_quiet: bool) -> None:
    """Runs a server until a signal; raises ConfigError, ModelLoadError, or OSError for the port."""
    settings.make(EngineConfig)  # the error names the origin of a wrong value
    http: HttpSettings = settings.make(HttpSettings)
    use_format(http.log_format)
    values = settings.of(EngineConfig)
    if "model" in values:
        location = find_model(values["model"])
        values["model"] = location.model
        values.setdefault("served_model_name", location.name)
    serve(Engine(progress=not is_quiet, **values), http, is_quiet=is_quiet)


def serve(engine: Engine, settings: HttpSettings, *, is_quiet: bool = False) -> None:
    """Starts the engine and serves it until a signal."""
    use_format(settings.log_format)
    server = HttpServer(engine, settings)
    _raise_file_limit()

    started_s = time.perf_counter()

    def on_ready(url: str) -> None:
        print_ready(server, engine, time.perf_counter() - started_s, is_quiet=is_quiet)

    async def live() -> None:
        if not await serve_until_signal(server, on_ready=on_ready):
            logging.shutdown()
            os._exit(0)  # loading the model cannot be interrupted

    uvloop.run(live())


def _raise_file_limit() -> None:
    """Raises the soft limit of open files, usually 1024, since each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
