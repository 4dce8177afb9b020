"""`serve bench`: its commands and options. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bench import cli_options as own
from serve import cli_options as opt
from serve.cli_reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError, MergestepError

measurements = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


class Bench(TyperCommand):
    """A first word that names a measurement of its own gets its own options and help."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        group: Any = typer.main.get_command(measurements)
        named = group.commands.get(args[0]) if args else None
        if named is None:
            return super().make_context(info_name, args, parent, **extra)
        return named.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


def online(
    model: opt.Model = DEFAULT_MODEL,
    qps: own.Qps = "1",
    url: own.Url = None,
    requests: own.Requests = None,
    duration: own.Duration = None,
    input_len: own.InputLen = None,
    output_len: own.OutputLen = None,
    seed: own.Seed = 0,
    warmup: own.Warmup = 4,
    json_file: own.JsonFile = None,
    dtype: opt.DType = "auto",
    max_model_len: opt.MaxModelLen = None,
    compute_threads: opt.ComputeThreads = None,
    backend: opt.Backend = "auto",
) -> None:
    """Measure latency under an open-loop load.

    `serve bench ops` measures the kernels, `serve bench io` the disk; --help goes with each.
    """
    settings = dict(locals())
    from bench.load import command

    set_up_logging("warning")
    with reported():
        _not_a_measurement(model)
        is_valid = command.run(**settings)
    if not is_valid:
        raise typer.Exit(3)


def _not_a_measurement(model: str) -> None:
    group: Any = typer.main.get_command(measurements)
    if model in group.commands:  # a model directory of that name is ./ops
        raise ConfigError(f"options come after the name: `serve bench {model} [OPTIONS]`")


@measurements.command("ops")
def ops(quick: opt.Quick = False) -> None:
    """Measure the kernels, each against what the machine can do."""
    from bench import ops

    with reported():
        _need_kernels("ops")
        ops.run_and_report(quick=quick)


@measurements.command("io")
def io(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where; here by default.", show_default=False),
    ] = None,
    quick: opt.Quick = False,
) -> None:
    """Measure the way to the disk below DIR, in a temporary folder."""
    from bench import io

    with reported():
        _need_kernels("io")
        io.run_and_report(directory or Path.cwd(), quick=quick)


def _need_kernels(what: str) -> None:
    from ops import native

    if not native.is_available():
        raise MergestepError(f"`serve bench {what}` needs the native kernels, which are not built")
