"""The options of `serve run`, one for each setting, which `serve cluster` has too. No heavy module
is imported here."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from serve import read_ahead
from serve.cli import setting_panels
from serve.cli.config_file import parse_size, read_config_file
from serve.cli.model_files import find_model
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
from serve.cli.setting_panels import Option
from serve.cluster.models.settings import ModelsSettings
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings
from serve.units import format_size

RUN_HELP = (
    "Serve MODEL over an OpenAI-compatible HTTP API.\n\n"
    "Several models are served at one address, each loaded when it is asked for.\n\n"
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
        models = _several(settings)
        if models:
            _serve_several(settings, models, process)
            return
        values, http = _found(settings, process)
        run_server = _import_server()
        run_server(values, http, is_quiet=process.quiet)


def _found(settings: RunSettings, process: ProcessSettings) -> tuple[dict[str, Any], HttpSettings]:
    """Returns the settings of the engine and of HTTP. A model of the hub that is not here is
    downloaded, and what is on the disk begins to be read before the imports."""
    config: EngineConfig = settings.make(
        EngineConfig
    )  # the error names the origin of a wrong value
    http: HttpSettings = settings.make(HttpSettings)
    values = settings.of(EngineConfig)
    if "model" in values or process.revision is not None:
        model = values.get("model", DEFAULT_MODEL)
        location = find_model(model, revision=process.revision, is_quiet=process.quiet)
        values["model"] = location.model
        values.setdefault("served_model_name", location.name)
        if config.num_ranks == 1 and config.backend != "cuda":
            read_ahead.begin(Path(location.model), config.packed_cache)
    if config.draft_model is not None:
        draft = find_model(str(config.draft_model), is_quiet=process.quiet)
        values["draft_model"] = draft.model
    return values, http


def _several(settings: RunSettings) -> list[str]:
    """Returns the models, if they are several: a directory that is no model stands for those in
    it."""
    first, more = settings.values["model"], settings.of(ModelsSettings).get("more_models", ())
    named = [first.value, *more] if first.origin or more else []
    models: list[str] = []
    for name in named:
        folder = Path(name).expanduser()
        found: list[Path] = []
        if folder.is_dir() and not (folder / "config.json").is_file():
            from serve.hub.cache import models_in

            found = models_in(folder)
        models += map(str, found) if len(found) > 1 else [name]
    return models if len(models) > 1 else []


def _serve_several(settings: RunSettings, models: list[str], process: ProcessSettings) -> None:
    from serve.cluster.models.start import run_models

    for name in ("served_model_name", "revision", "metrics_port", "weights_listen"):
        if settings.values[name].value is not None:
            raise ConfigError(f"{name} is of one model, and {len(models)} are to be served")
    config: EngineConfig = settings.make(EngineConfig)
    found = [find_model(model, is_quiet=process.quiet) for model in models]
    if config.draft_model is not None:
        find_model(str(config.draft_model), is_quiet=process.quiet)
    run_models(
        [(each.model, each.name) for each in found],
        config,
        settings.make(HttpSettings),
        settings.make(ModelsSettings),
        lambda changes, without: settings.as_file(changes, without),
        is_quiet=process.quiet,
    )


def _import_server() -> Callable[..., None]:
    """Imports the server. Classes and functions are never garbage, and looking for it among them
    takes a tenth of the time of all imports, and some of each later collection."""
    gc.disable()
    try:
        from serve.cli.server_process import run_server
    finally:
        gc.freeze()
        gc.enable()
    return run_server


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
    from serve.cli.run_settings import config_lines

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
    if setting.name == "more_models":
        many = typer.Argument(metavar="[MODEL]...", show_default=False, **more)
        return keyword(setting.name, Annotated[list[str] | None, many], None)
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


def signature(*more: inspect.Parameter, without: type[Any] | None = None) -> inspect.Signature:
    """Returns the signature of a command with all settings. more: its own options. without: the
    owner of settings that it does not have."""
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    config = Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read settings from this TOML file.",
            envvar=CONFIG_ENV,
            rich_help_panel=setting_panels.SERVER,
        ),
    ]
    print_config = Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print all settings as TOML, with the origin of each, and exit.",
            rich_help_panel=setting_panels.SERVER,
        ),
    ]
    own = [keyword("config", config, None), keyword("print_config", print_config, False)]
    order = setting_panels.PANELS.index
    all_settings = [item for item in SETTINGS.values() if not item.option.is_secret]
    settings = [item for item in all_settings if item.owner is not without]
    settings.sort(key=lambda setting: order(setting.option.panel))
    return inspect.Signature([context, *more, *own, *map(_parameter, settings)])


run_command.__signature__ = signature()  # type: ignore[attr-defined]
