"""The options of `serve bench`: their types and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Qps = Annotated[str, typer.Option(help="Offered requests per second, or inf.")]
Url = Annotated[
    str | None, typer.Option(help="Measure this server; else an engine in this process.")
]
Requests = Annotated[int | None, typer.Option(help="How many; 100 by default.")]
Duration = Annotated[float | None, typer.Option(help="Seconds of load instead.")]
InputLen = Annotated[int | None, typer.Option(help="Random prompts of this length.")]
OutputLen = Annotated[
    int | None, typer.Option(help="Tokens per answer: exact with --input-len, else at most.")
]
Seed = Annotated[int, typer.Option(help="Of arrivals and prompts.")]
Warmup = Annotated[int, typer.Option(help="Requests before the measured ones.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write settings, summary and every request.")
]
