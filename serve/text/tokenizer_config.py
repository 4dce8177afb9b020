"""Reads what a checkpoint's JSON files say about texts: named tokens and the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.checkpoint_json import read_bytes, read_json
from serve.errors import ModelLoadError

MAX_TEMPLATE_BYTES = 4 << 20
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The configuration of a directory. values: of tokenizer_config.json. named_tokens: "bos_token"
    -> "<s>" and so on; a tokenizer.model adds those that it names. template_file: has the chat
    template, if there is one."""

    path: Path
    values: dict[str, Any]
    named_tokens: dict[str, str]
    chat_template: str | None
    template_file: Path


def read_text_config(path: Path) -> TextConfig:
    """Reads a Hugging Face directory. ModelLoadError names the file that is wrong."""
    file = path / "tokenizer_config.json"
    values = optional_json(file)
    if values.get("auto_map") is not None:
        raise ModelLoadError(
            f"{file}: auto_map asks for code from the checkpoint, which is never run"
        )
    named = named_tokens_of(optional_json(path / "special_tokens_map.json"))
    template_file = path / "chat_template.jinja"
    if template_file.exists():
        template: str | None = _read_template(template_file)
    else:
        template, template_file = _default_template(values.get("chat_template")), file
    return TextConfig(path, values, named | named_tokens_of(values), template, template_file)


def optional_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file; {} if it does not exist."""
    return read_json(file) if file.exists() else {}


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


def _read_template(file: Path) -> str:
    try:
        return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error


def _default_template(template: object) -> str | None:
    """Returns the template, or the default one of several."""
    for item in template if isinstance(template, list) else ():
        if isinstance(item, dict) and item.get("name") == "default":
            template = item.get("template")
    return template if isinstance(template, str) else None
