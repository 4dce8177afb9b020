"""`serve run`: the life of a server process."""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import shlex

import uvloop
from rich.console import Console

from serve.config import EngineConfig
from serve.engine import Engine
from serve.http.server import HttpServer, serve_until_signal
from serve.http.settings import HttpSettings
from serve.run_settings import RunSettings

MAX_FILES = 65_536


def run(asked: RunSettings, *, is_quiet: bool) -> None:
    """Until a signal. ConfigError, ModelLoadError, OSError where the port cannot be had."""
    asked.make(EngineConfig)  # says where a wrong value came from
    http: HttpSettings = asked.make(HttpSettings)
    serve(Engine(progress=not is_quiet, **asked.of(EngineConfig)), http, is_quiet=is_quiet)


def serve(engine: Engine, settings: HttpSettings, *, is_quiet: bool = False) -> None:
    """The life of a server around an engine that has not started."""
    server = HttpServer(engine, settings)
    _raise_file_limit()

    async def live() -> None:
        on_ready = functools.partial(_print_ready, model=engine.model_name)
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


def _print_ready(url: str, model: str) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    lines = (
        f"{model} is ready at {url}/v1",
        "",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(body)}",
    )
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
