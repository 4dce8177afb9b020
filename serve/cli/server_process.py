"""The server process of `serve run`."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from typing import Any

import uvloop

from serve.cli.log_format import use_format
from serve.cli.start_summary import print_ready
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.errors import EngineStoppedError
from serve.http.edge.file_limit import raise_file_limit
from serve.http.edge.settings import HttpSettings
from serve.http.server import HttpServer, serve_until_signal
from serve.single_file.config import with_directory

_RANK_VARIABLES = {"WORLD_SIZE", "LWS_GROUP_SIZE"}


def run_server(values: dict[str, Any], http: HttpSettings, *, is_quiet: bool) -> None:
    """Runs a server until a signal. values: the engine's settings, with a model that was found.

    Raises ConfigError, ModelLoadError, or OSError for the port.
    """
    use_format(http.log_format)
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
        gc.freeze()  # the model stays as long as the process
        load_s = time.perf_counter() - started_s
        # in a thread, since it waits for the trial of the chat template: requests do not
        threading.Thread(target=show, args=(load_s,), name="start-summary", daemon=True).start()

    def show(load_s: float) -> None:
        with contextlib.suppress(EngineStoppedError):  # a signal was faster
            print_ready(server, engine, load_s, is_quiet=is_quiet)

    async def live() -> None:
        await serve_until_signal(server, on_ready=on_ready)

    uvloop.run(live())
