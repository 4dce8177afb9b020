"""`serve bench soak`: turns options into a soak, and its results into tables and a file."""

from __future__ import annotations

import shlex
from pathlib import Path

import uvloop

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.soak.report import document, show, show_sample
from bench.soak.run import SoakSettings, SoakTest
from bench.soak.server import server_process
from bench.soak.streams import Outcomes
from bench.soak.usage import Usage
from serve.config import EngineConfig
from serve.errors import MergestepError

_LINE_S = 60.0


def soak(
    model: str | None = None,
    *,
    minutes: float = 60.0,
    streams: int = 64,
    aborts: float = 0.3,
    hostile: float = 0.1,
    max_slope: float = 1.0,
    run_options: str = "",
    seed: int = 0,
    json_file: Path | None = None,
) -> bool:
    """Loads a server process of its own for some minutes and prints what its memory did. Returns
    whether that decides if memory grows.

    model is a directory, "random:SHAPE", or None for the embedded model. run_options: more options
    of `serve run`. Raises MergestepError for a fault, after the tables, and ConfigError before
    anything runs.
    """
    tables.check_file(json_file)
    settings = SoakSettings(minutes, streams, aborts, hostile, max_slope, seed=seed)
    path = model_directory(model)
    head = tables.Head.now(f"soak, {EngineConfig.from_settings(path).model_name}")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    shown_s = 0.0

    def report(usage: Usage, outcomes: Outcomes) -> None:
        nonlocal shown_s
        if usage.at_s - shown_s >= min(_LINE_S, 6 * minutes):
            shown_s = usage.at_s
            show_sample(usage, outcomes.total(), outcomes.total("failed"), console)

    with server_process(path, shlex.split(run_options)) as server:
        result = uvloop.run(SoakTest(server, settings, report).run())
    show(result, console)
    tables.write(json_file, head, document(result))
    faults = result.faults()
    if faults:
        raise MergestepError("; ".join(faults))
    return not result.undecided()
