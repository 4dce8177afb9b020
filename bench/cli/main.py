"""The commands `serve bench` and `serve plan`. Heavy imports happen inside the functions."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bench.cli.measurements import measurements
from bench.cli.plan import plan
from bench.common.cli_options import ENGINE, ENGINE_SETTINGS, LOAD_OPTIONS
from bench.load.workload.online_options import OnlineOptions
from serve.cli import examples, options
from serve.cli.reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError


class Bench(TyperCommand):
    """The command `serve bench`. Its first word may name a measurement that has its own options."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        group: Any = typer.main.get_command(measurements)
        named = group.commands.get(args[0]) if args else None
        if named is None:
            return super().make_context(info_name, args, parent, **extra)
        return named.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


def online(**settings: Any) -> None:
    """Measure a server, an engine in this process or a simulated engine under load.

    Latencies are counted from the time at which each request was due.

    Other names: throughput, latency, startup, ops, io, engine, http, prefix-cache, soak, stalls,
    nodes, ablation.

    `serve bench NAME --help` describes each. `serve bench compare` sets results side by side.
    """
    engine = {name: settings.pop(name) for name in ENGINE_SETTINGS}
    from bench.cli.load import run

    set_up_logging("warning")
    with reported():
        _check_is_no_measurement(settings["model"])
        is_valid = run(OnlineOptions(**settings, engine=engine))
    if not is_valid:
        raise typer.Exit(3)


def _signature() -> inspect.Signature:
    """Returns the command's parameters: the fields of OnlineOptions, then those of the engine."""
    parameters = [_keyword("model", options.Model, DEFAULT_MODEL)]
    types = typing.get_type_hints(OnlineOptions)
    for item in fields(OnlineOptions):
        option = LOAD_OPTIONS.get(item.name)
        if option is not None:
            flag = option.flag or "--" + item.name.replace("_", "-")
            info = typer.Option(flag, help=option.help, rich_help_panel=option.panel)
            parameters.append(_keyword(item.name, Annotated[types[item.name], info], item.default))
    types = typing.get_type_hints(EngineConfig)
    defaults = {item.name: item.default for item in fields(EngineConfig)}
    for name in ENGINE_SETTINGS:
        info = options.run_option(name, rich_help_panel=ENGINE)
        parameters.append(_keyword(name, Annotated[types[name], info], defaults[name]))
    return inspect.Signature(parameters)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _check_is_no_measurement(model: str) -> None:
    """Refuses the name of a measurement, and one that resembles it and is no directory."""
    group: Any = typer.main.get_command(measurements)
    if model in group.commands:  # a model directory of the same name can be given as ./ops
        raise ConfigError(f"options come after the name: `serve bench {model} [OPTIONS]`")
    near = difflib.get_close_matches(model, group.commands, n=1, cutoff=0.75)
    if near and not Path(model).exists():
        raise ConfigError(
            f"there is neither a measurement nor a model {model!r}; did you mean"
            f" `serve bench {near[0]}`?"
        )


online_signed: Callable[..., None] = online
online_signed.__signature__ = _signature()  # type: ignore[attr-defined]

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("bench", cls=Bench, epilog=examples.BENCH)(online_signed)
app.command("plan", epilog=examples.PLAN)(plan)


def command(name: str | None) -> Any:
    """Returns the click command `serve bench` or `serve plan`."""
    group: Any = typer.main.get_command(app)
    return group.commands[name]
