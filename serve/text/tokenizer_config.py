"""Reads named tokens and the chat template from a checkpoint's JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve.errors import ModelLoadError
from serve.models.config_file import read_json

MAX_TEMPLATE_BYTES = 4 << 20
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def optional_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file; {} if it does not exist."""
    return read_json(file) if file.is_file() else {}


def token_string(value: object) -> str | None:
    """Reads a token, which is a string or an object with `content`; None for other values."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def listed(config: dict[str, Any], key: str) -> list[object]:
    """Returns a list of the configuration; [] for other values."""
    value = config.get(key)
    return value if isinstance(value, list) else []


def named_tokens_of(config: dict[str, Any]) -> dict[str, str]:
    """Returns the named tokens that are configured, such as "bos_token" -> "<s>"."""
    tokens = {name: token_string(config.get(name)) for name in NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}


def chat_template_of(path: Path, config: dict[str, Any]) -> str | None:
    """Reads chat_template.jinja, else the (default) template of tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            if file.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ModelLoadError(f"{file} is larger than {MAX_TEMPLATE_BYTES} bytes")
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}") from error
    template = config.get("chat_template")
    for item in template if isinstance(template, list) else ():
        if isinstance(item, dict) and item.get("name") == "default":
            template = item.get("template")
    return template if isinstance(template, str) else None
