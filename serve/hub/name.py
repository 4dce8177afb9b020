"""The name of a model on the hub: org/name, or org/name:FILE or org/name:QUANT for GGUF."""

from __future__ import annotations

import re
from typing import NamedTuple

from serve.errors import ConfigError

MAX_PATH = 1024
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./+-]{0,254}[A-Za-z0-9_+-])?")


class HubName(NamedTuple):
    """repository: "org/name". choice: the GGUF file or the quantization, if one was given."""

    repository: str
    choice: str | None = None

    def __str__(self) -> str:
        return self.repository if self.choice is None else f"{self.repository}:{self.choice}"


def parse_name(text: str) -> HubName | None:
    """Returns the parts of a name; None for a text that cannot be one, such as a path."""
    repository, colon, choice = text.partition(":")
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        return None
    if not colon:
        return HubName(repository)
    return HubName(repository, choice) if is_safe_path(choice) else None


def check_revision(revision: str) -> str:
    """Returns a branch, tag or commit that may stand in a path. ConfigError for any other text."""
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or not all(map(is_safe_path, parts)) or ".." in revision:
        raise ConfigError(f"revision {revision!r} is not the name of a branch, a tag or a commit")
    return revision


def is_safe_path(path: str) -> bool:
    """Returns whether the path of a file in a repository stays below the folder it is put in, and
    consists of printable characters that all file systems take."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH
        and path.isprintable()
        and not any(char in path for char in '\\:*?"<>|')
        and all(part and len(part.encode()) <= 255 and part.strip(". ") for part in parts)
    )
