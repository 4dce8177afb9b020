"""Reads what a checkpoint's JSON files say about texts: named tokens and the chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from serve.checkpoint_json import read_bytes, read_json
from serve.errors import ModelLoadError
from serve.text.mistral_template import find_version, mistral_template

MAX_TEMPLATE_BYTES = 4 << 20
MAX_TEKKEN_BYTES = 256 << 20
DEFAULT, TOOL_USE = "default", "tool_use"
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The configuration of a directory. values: of tokenizer_config.json. named_tokens: "bos_token"
    -> "<s>" and so on; a tokenizer.model adds those that it names. template_file: has the chat
    template, if there is one. tool_template: the template of conversations with tools, where it is
    another one. added_tokens: ids of added_tokens.json. notes: what is said at the start."""

    path: Path
    values: dict[str, Any]
    named_tokens: dict[str, str]
    chat_template: str | None
    template_file: Path
    tool_template: str | None = None
    added_tokens: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Templates(NamedTuple):
    """Chat templates by name, the file they are from, and what is said about them."""

    by_name: dict[str, str]
    file: Path
    note: str | None = None


def read_text_config(path: Path) -> TextConfig:
    """Reads a Hugging Face directory. ModelLoadError names the file that is wrong."""
    file = path / "tokenizer_config.json"
    values = optional_json(file)
    notes = []
    if values.get("auto_map") is not None:
        notes.append(f"{file} names code of the checkpoint (auto_map), which is not run")
    named = named_tokens_of(optional_json(path / "special_tokens_map.json"))
    templates = _read_templates(path, values)
    if templates.note is not None:
        notes.append(templates.note)
    return TextConfig(
        path,
        values,
        named | named_tokens_of(values),
        templates.by_name.get(DEFAULT),
        templates.file,
        templates.by_name.get(TOOL_USE),
        _added_tokens(path / "added_tokens.json"),
        tuple(notes),
    )


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


def extra_tokens(config: dict[str, Any]) -> list[str]:
    """Returns the special tokens without a usual name, which are listed or have names of their
    own."""
    found: list[object] = []
    for key in EXTRA_TOKENS:
        value = config.get(key)
        found += value.values() if isinstance(value, dict) else listed(config, key)
    return [token for item in found if (token := token_string(item)) is not None]


def named_tokens_of(config: dict[str, Any]) -> dict[str, str]:
    """Returns the named tokens that are configured, such as "bos_token" -> "<s>"."""
    tokens = {name: token_string(config.get(name)) for name in NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}


def _read_templates(path: Path, values: dict[str, Any]) -> _Templates:
    """Looks for templates in the order of Transformers: files of templates, tokenizer_config.json,
    chat_template.json. A tekken.json alone has a template that is built in."""
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    named = {file.stem: _read_template(file) for file in files}
    file = path / "chat_template.jinja"
    if file.exists():
        return _Templates(named | {DEFAULT: _read_template(file)}, file)
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        if file.name != "tokenizer_config.json":
            values = optional_json(file)
        if found := named_templates(values.get("chat_template")):
            return _Templates(named | found, file)
    tekken = path / "tekken.json"
    if DEFAULT not in named and tekken.exists():
        return _built_in(tekken, named)
    return _Templates(named, path / "tokenizer_config.json")


def _built_in(tekken: Path, named: dict[str, str]) -> _Templates:
    version = find_version(read_bytes(tekken, MAX_TEKKEN_BYTES))
    if version is None:
        return _Templates(named, tekken, f"{tekken} has a version without a chat template")
    note = f"no chat template in {tekken.parent}: the built-in one of Mistral's v{version} is used"
    return _Templates(named | {DEFAULT: mistral_template(version)}, tekken, note)


def _read_template(file: Path) -> str:
    try:
        return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error


def named_templates(value: object) -> dict[str, str]:
    """Returns the templates of a `chat_template`, which is one or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT: value}
    found: dict[str, str] = {}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            name, template = item.get("name"), item.get("template")
            if isinstance(name, str) and isinstance(template, str):
                found[name] = template
    return found


def _added_tokens(file: Path) -> dict[str, int]:
    added = optional_json(file)
    for token, index in added.items():
        if type(index) is not int or index < 0 or not token:
            raise ModelLoadError(f"{file} has no token id for {token!r:.60}: {index!r:.40}")
    return added
