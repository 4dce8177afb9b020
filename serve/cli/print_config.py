"""`serve run --print-config` prints all settings as a TOML file for --config."""

from __future__ import annotations

from collections.abc import Iterator

from serve.cli.config_file import toml_value
from serve.cli.run_settings import SETTINGS, RunSettings, Setting, Value
from serve.cli.setting_panels import PANELS
from serve.config import EngineConfig
from serve.http.edge.settings import HttpSettings
from serve.units import format_size

_COLUMN = 44


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
