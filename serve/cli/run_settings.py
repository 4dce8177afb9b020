"""Every setting of `serve run` and the origin of its value.

The settings are the fields of dataclasses: a field is a flag, an environment variable and a key of
the configuration file, all of one name. A flag takes precedence over the environment, the
environment over the file, and the file over the default. `serve run --print-config` prints them as
a file for --config.
"""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

from serve.cli.config_file import ConfigFile, parse_size, split_list, toml_value
from serve.cli.setting_help import ENGINE_OPTIONS, HTTP_OPTIONS, PROCESS_OPTIONS
from serve.cli.setting_panels import PANELS, SEVERAL_MODELS, Option
from serve.cluster.models.settings import ModelsSettings
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings
from serve.machine import LOCAL_KV_ENV
from serve.units import format_size

ENV_PREFIX = "MERGESTEP_"
CONFIG_ENV = "MERGESTEP_CONFIG"
# Settings that are Python objects and cannot be written as text.
IN_PYTHON_ONLY: frozenset[str] = frozenset()
# Environment variables that other modules read.
_OTHER_ENVS = frozenset({CONFIG_ENV, "MERGESTEP_API_KEY", LOCAL_KV_ENV})
_COLUMN = 44  # where the origins of printed values begin
_MAX_INTEGER = (1 << 63) - 1
_ADDRESSES = ("memory_nodes", "kvp", "borrow", "kv_peers")
_KINDS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings that concern neither the engine nor HTTP."""

    log_level: str = "info"
    quiet: bool = False
    revision: str | None = None


MODELS_OPTIONS: dict[str, Option] = {
    "more_models": Option(
        SEVERAL_MODELS,
        "Further models, served at the same address by their names and loaded when they are asked"
        " for; a directory of models stands for all in it.",
    ),
    "idle_seconds": Option(
        SEVERAL_MODELS,
        "Time without requests after which a model is put to sleep; inf: only when others need its"
        " memory.",
        metavar="SECONDS",
    ),
    "memory_budget": Option(
        SEVERAL_MODELS,
        "Memory of all models together; by default 80 % of what is free at the start.",
        is_size=True,
    ),
    "model_wait_s": Option(
        SEVERAL_MODELS,
        "How long a request waits for its model before it is refused.",
        metavar="SECONDS",
    ),
    "max_model_waiting": Option(SEVERAL_MODELS, "Most requests that wait for their models."),
}

OWNERS: tuple[tuple[type[Any], dict[str, Option]], ...] = (
    (EngineConfig, ENGINE_OPTIONS),
    (HttpSettings, HTTP_OPTIONS),
    (ProcessSettings, PROCESS_OPTIONS),
    (ModelsSettings, MODELS_OPTIONS),
)
POSITIONAL = ("model", "more_models")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. kind: boolean, integer, number, text, size or list. owner: its dataclass."""

    name: str
    kind: str
    default: Any
    owner: type[Any]
    option: Option

    @property
    def flag(self) -> str:
        return "MODEL" if self.name in POSITIONAL else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def env_in(self, environment: Mapping[str, str]) -> str | None:
        """Returns the first of its environment variables that is set."""
        names = (self.env, *self.option.envs)
        return next((name for name in names if environment.get(name)), None)


@dataclass(frozen=True, slots=True)
class Value:
    """A value. origin: "flag --port", "environment MERGESTEP_PORT", "file x.toml", or "" for the
    default."""

    value: Any
    origin: str = ""


def _kind(annotation: Any, option: Option) -> str:
    if option.is_size:
        return "size"
    if typing.get_origin(annotation) is tuple:
        return "list"
    members = [annotation]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [item for item in typing.get_args(annotation) if item is not type(None)]
    return _KINDS[members[0]]


def _all_settings() -> dict[str, Setting]:
    settings = {}
    for owner, options in OWNERS:
        hints = typing.get_type_hints(owner)
        for item in fields(owner):
            option = options.get(item.name)
            if option is not None:
                kind = _kind(hints[item.name], option)
                settings[item.name] = Setting(item.name, kind, item.default, owner, option)
    return settings


SETTINGS = _all_settings()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a `serve run`: values by name, each with its origin."""

    values: dict[str, Value] = field(repr=False)  # some values are secret

    def of(self, owner: type[Any]) -> dict[str, Any]:
        """Returns the values that are set for fields of this dataclass, without the defaults."""
        return {
            name: item.value
            for name, item in self.values.items()
            if item.origin and SETTINGS[name].owner is owner
        }

    def make(self, owner: type[Any]) -> Any:
        """Makes and checks the dataclass; ConfigError also names the origin of the wrong value."""
        try:
            return owner(**self.of(owner))
        except ConfigError as error:
            name = str(error).split(" ")[0].rstrip(":")
            given = self.values.get(name, Value(None))
            near = ""
            if isinstance(given.value, str) and "must be one of" in str(error):
                near = suggestion(given.value, SETTINGS[name].option.choices)
            if given.origin and not given.origin.startswith("flag"):
                raise ConfigError(f"{error}{near} ({given.origin})") from error
            if near:
                raise ConfigError(f"{error}{near}") from error
            raise

    def as_file(self, changes: Mapping[str, Any], without: typing.Iterable[str] = ()) -> str:
        """Returns the values that are set, with changes, as the text of a configuration file. No
        secret is in it."""
        values = {
            name: item.value
            for name, item in self.values.items()
            if item.origin and item.value is not None and not SETTINGS[name].option.is_secret
        }
        for name in without:
            values.pop(name, None)
        values |= changes
        return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())

    def secrets(self) -> dict[str, str]:
        """Returns the secret values as variables of the environment."""
        found = {
            SETTINGS[name].env: item.value
            for name, item in self.values.items()
            if SETTINGS[name].option.is_secret and item.value
        }
        return {name: v if isinstance(v, str) else ",".join(v) for name, v in found.items()}


def resolve(
    given: Mapping[str, Any],
    source_of: Callable[[str], str],
    file: ConfigFile | None,
    environment: MutableMapping[str, str],
) -> RunSettings:
    """Resolves the value of every setting.

    given: the values that the command line's parser took from flags and the environment.
    source_of: the parser's name for the source of a setting. file: the configuration file, if any.
    environment: its secrets are removed from it.
    """
    values = {}
    in_file = {} if file is None else _from_file(file)
    for name, setting in SETTINGS.items():
        if setting.option.is_secret:
            values[name] = _take_secret(setting, environment)
            continue
        source = source_of(name)
        if source == "COMMANDLINE":
            values[name] = Value(_parsed(setting, given[name]), f"flag {setting.flag}")
        elif source == "ENVIRONMENT":
            env = setting.env_in(environment)
            # the parser splits a list of arguments at blanks
            value = environment[env] if env and setting.kind == "list" else given[name]
            values[name] = Value(_parsed(setting, value), f"environment {env}")
        elif file is not None and name in in_file:
            values[name] = Value(in_file[name], f"file {file.path}")
        else:
            values[name] = Value(setting.default)
        if type(values[name].value) is int and abs(values[name].value) > _MAX_INTEGER:
            raise ConfigError(f"{name} is too large a number ({values[name].origin})")
    return RunSettings(values)


def _take_secret(setting: Setting, environment: MutableMapping[str, str]) -> Value:
    """Removes the secret from the environment, so that child processes do not inherit it."""
    env = setting.env_in(environment)
    if env is None:
        return Value(setting.default)
    value = Value(_parsed(setting, environment[env]), f"environment {env}")
    for name in (setting.env, *setting.option.envs):
        if environment is os.environ:
            _overwrite(name)
        environment.pop(name, None)
    return value


def _overwrite(env: str) -> None:
    """Overwrites a variable in memory: /proc/PID/environ shows the first environment for ever."""
    import ctypes

    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    address = library.getenv(os.fsencode(env))
    if address is not None:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


def _parsed(setting: Setting, value: Any) -> Any:
    if setting.kind != "list" or not isinstance(value, str):
        return value
    items = split_list(value)
    # an empty list of nodes must be refused, not served without nodes
    return items if items or setting.name not in _ADDRESSES else value


def _from_file(file: ConfigFile) -> dict[str, Any]:
    values = {}
    for key, value in file.values.items():
        setting = SETTINGS.get(key)
        if setting is None:
            known = ": settings must not stand in a table" if isinstance(value, dict) else None
            problem = f"there is no setting {key!r}{known or suggestion(key, SETTINGS)}"
            raise ConfigError(f"{file.path}: {problem}")
        if setting.option.is_secret:
            env = setting.option.envs[0] if setting.option.envs else setting.env
            raise ConfigError(
                f"{file.path}: {key} is secret; set {env} in the environment, or name a file"
                " in another setting"
            )
        values[key] = _checked(setting, value, file.path)
    return values


def _checked(setting: Setting, value: Any, path: str) -> Any:
    """Checks the type of a value in a TOML file, without conversion between types."""
    kind = setting.kind
    if kind == "size" and isinstance(value, str):
        return _size(setting, value, path)
    if kind == "list":
        if isinstance(value, str):
            return split_list(value)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise _wrong_type(setting, "a list of strings", path)
    expected, name = {
        "boolean": ((bool,), "true or false"),
        "integer": ((int,), "a whole number"),
        "size": ((int,), 'a whole number of bytes or a size such as "2GiB"'),
        "number": ((int, float), "a number"),
        "text": ((str,), "a string"),
    }[kind]
    if type(value) not in expected:
        raise _wrong_type(setting, name, path)
    try:
        return float(value) if kind == "number" else value
    except OverflowError as error:
        raise _wrong_type(setting, "a smaller number", path) from error


def _size(setting: Setting, text: str, path: str) -> int:
    from typer import BadParameter

    try:
        return parse_size(text)
    except BadParameter as error:
        raise ConfigError(f"{path}: {setting.name}: {error.message}") from error


def _wrong_type(setting: Setting, expected: str, path: str) -> ConfigError:
    return ConfigError(f"{path}: {setting.name} must be {expected}")


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """Returns "; did you mean x?" for the most similar name, else ""."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a warning for each MERGESTEP_* variable that resembles a setting but is none."""
    known = {setting.env for setting in SETTINGS.values()} | _OTHER_ENVS
    known |= {env for setting in SETTINGS.values() for env in setting.option.envs}
    unknown = sorted(n for n in environment if n.startswith(ENV_PREFIX) and n not in known)
    return [
        f"the environment has {name}, which is not a setting{hint}"
        for name in unknown
        if (hint := suggestion(name, known))
    ]


def config_lines(settings: RunSettings) -> Iterator[str]:
    """Yields a line for each setting; raises ConfigError for invalid values."""
    settings.make(EngineConfig)
    settings.make(HttpSettings)
    yield "# Settings of `serve run`; `serve run --config FILE` reads them."
    for panel in PANELS:
        members = [item for item in SETTINGS.values() if item.option.panel == panel]
        if members:
            yield f"\n# {panel}"
        for setting in members:
            yield _line(setting, settings.values[setting.name])


def _line(setting: Setting, item: Value) -> str:
    value, origin = item.value, item.origin or "default"
    if not origin.isprintable():  # the name of a file
        origin = repr(origin)
    if setting.option.is_secret:
        return f"{f'# {setting.name} =':{_COLUMN}} # {origin}: {'hidden' if value else 'none'}"
    if value is None:  # TOML has no null
        return f"{f'# {setting.name} =':{_COLUMN}} # {origin}: none"
    if setting.kind == "size" and not (text := format_size(value)).isdigit():
        value = text
    return f"{f'{setting.name} = {toml_value(value)}':{_COLUMN}} # {origin}"
