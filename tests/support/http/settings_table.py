"""Makes the table of settings in docs/configuration.md.

`python tests/support/http/settings_table.py` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = (
    "<!-- settings: tests/support/http/settings_table.py -->\n",
    "<!-- end of settings -->\n",
)


def table() -> str:
    from serve.cli.run_settings import SETTINGS
    from serve.cli.setting_panels import PANELS

    lines = []
    for panel in PANELS:
        members = [item for item in SETTINGS.values() if item.option.panel == panel]
        if members:
            lines += [f"\n### {panel}\n", "| key | default | |", "|---|---|---|"]
        for setting in members:
            text = setting.option.help.replace("|", "\\|")
            if setting.option.is_secret:
                text += f" Only `{(*setting.option.envs, setting.env)[0]}`."
            lines.append(f"| `{setting.name}` | {_default(setting)} | {text} |")
    return "\n".join(lines) + "\n\n"


def _default(setting: Any) -> str:
    from serve.cli.config_file import toml_value
    from serve.units import format_size

    if setting.default is None or setting.default == ():
        return ""
    if setting.kind == "size":
        return f"`{format_size(setting.default)}`"
    return f"`{toml_value(setting.default)}`"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_table(PAGE.read_text()))
