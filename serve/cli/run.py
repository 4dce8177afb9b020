"""The options of `serve run`, one for each setting, which `serve cluster` has too. No heavy module
is imported here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from serve.cli import setting_help
from serve.cli.config_file import parse_size, read_config_file
from serve.cli.options import completion
from serve.cli.reporting import reported, set_up_logging, warn
from serve.cli.run_settings import (
    CONFIG_ENV,
    SETTINGS,
    ProcessSettings,
    RunSettings,
    Setting,
    resolve,
    unknown_variables,
)
from serve.cli.setting_help import Option
from serve.units import format_size

RUN_HELP = (
    "Serve MODEL over an OpenAI-compatible HTTP API.\n\n"
    "Every setting is a flag, an environment variable (in brackets) and a key of the TOML file that"
    " --config names: the flag's name with underscores."
)


def run_command(context: typer.Context, **given: Any) -> None:
    """Runs `serve run`. typer makes its options from `signature`."""
    with reported():
        settings = resolved(context, given)
        process: ProcessSettings = settings.make(ProcessSettings)
        for message in unknown_variables(os.environ):
            warn(message)
        if given["print_config"]:
            _print_config(settings)
            return
        from serve.cli.server_process import run_server

        run_server(settings, revision=process.revision, is_quiet=process.quiet)


def resolved(context: typer.Context, given: Mapping[str, Any]) -> RunSettings:
    """Returns all settings, from the command line, the environment and the file that --config
    names, and sets up logging as they say. Raises ConfigError."""
    path = given["config"]
    settings = resolve(
        given,
        lambda name: getattr(context.get_parameter_source(name), "name", "DEFAULT"),
        None if path is None else read_config_file(path),
        os.environ,
    )
    process: ProcessSettings = settings.make(ProcessSettings)
    set_up_logging(process.log_level)
    return settings


def _print_config(settings: RunSettings) -> None:
    from serve.cli.print_config import config_lines

    typer.echo("\n".join(config_lines(settings)))


def _help(option: Option) -> str:
    """Returns the help, with the possible values unless its text names them."""
    if all(choice in option.help for choice in option.choices):
        return option.help
    return f"{option.help} One of {', '.join(option.choices)}."


def _parameter(setting: Setting) -> inspect.Parameter:
    """Returns the parameter of which typer makes the option."""
    option, default = setting.option, setting.default
    more: dict[str, Any] = {
        "help": _help(option),
        "envvar": [setting.env, *option.envs] if option.envs else setting.env,
        "rich_help_panel": option.panel,
    }
    if setting.name == "model":
        del more["rich_help_panel"]
        made = typer.Argument(metavar="MODEL", show_default="the embedded model", **more)
        return keyword("model", Annotated[str, made], default)
    more["metavar"] = "LIST" if setting.kind == "list" else option.metavar
    if option.choices:
        more["autocompletion"] = completion(option.choices)
    base: Any = {"boolean": bool, "integer": int, "number": float, "size": int}.get(
        setting.kind, str
    )
    if setting.kind == "size":
        more |= {"parser": parse_size, "metavar": "SIZE"}
        if default is not None:
            more["show_default"] = format_size(default)
    names = [setting.flag, *option.flags]
    if setting.kind == "boolean":  # so that a flag can unset what a file sets
        names[0] = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
    if setting.kind == "list":
        default = ",".join(default) or None
    annotation = base if default is not None else base | None
    return keyword(setting.name, Annotated[annotation, typer.Option(*names, **more)], default)


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Returns a parameter of which typer makes an option."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def signature(*more: inspect.Parameter) -> inspect.Signature:
    """Returns the signature of a command with all settings. more: its own options."""
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    config = Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read settings from this TOML file.",
            envvar=CONFIG_ENV,
            rich_help_panel=setting_help.SERVER,
        ),
    ]
    print_config = Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print all settings as TOML, with the origin of each, and exit.",
            rich_help_panel=setting_help.SERVER,
        ),
    ]
    own = [keyword("config", config, None), keyword("print_config", print_config, False)]
    order = setting_help.PANELS.index
    settings = [item for item in SETTINGS.values() if not item.option.is_secret]
    settings.sort(key=lambda setting: order(setting.option.panel))
    return inspect.Signature([context, *more, *own, *map(_parameter, settings)])


run_command.__signature__ = signature()  # type: ignore[attr-defined]
