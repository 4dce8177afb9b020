"""`serve run`: the life of a server process."""

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


def run_server(asked: RunSettings, *, is_quiet: bool) -> None:
    """Until a signal. ConfigError, ModelLoadError, OSError where the port cannot be had."""
    asked.make(EngineConfig)  # says where a wrong value came from
    http: HttpSettings = asked.make(HttpSettings)
    use_format(http.log_format)
    values = asked.of(EngineConfig)
    if "model" in values:
        found = find_model(values["model"])
        values["model"] = found.model
        values.setdefault("served_model_name", found.name)
    serve(Engine(progress=not is_quiet, **values), http, is_quiet=is_quiet)


def serve(engine: Engine, settings: HttpSettings, *, is_quiet: bool = False) -> None:
    """The life of a server around an engine that has not started."""
    use_format(settings.log_format)
    server = HttpServer(engine, settings)
    _raise_file_limit()

    started_s = time.perf_counter()

    def on_ready(url: str) -> None:
        print_ready(server, engine, time.perf_counter() - started_s, is_quiet=is_quiet)

    async def live() -> None:
        if not await serve_until_signal(server, on_ready=on_ready):
            logging.shutdown()
            os._exit(0)  # a load cannot be interrupted, and nothing needs its end

    uvloop.run(live())


def _raise_file_limit() -> None:
    """A connection is a file; the usual soft limit of 1024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
