"""The file that says where the weights of a directory are, if they are in GGUF files elsewhere.

Such a directory has the other files of a Hugging Face model. The pointer names the files' size and
time of change, so that a directory is not used with another model that has taken their place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve.checkpoint_json import ConfigReader, read_json
from serve.errors import ModelLoadError, reason
from serve.models.gguf.reader import MAX_SPLITS

POINTER = "gguf.json"
_MAX_BYTES = 1 << 20


def write_pointer(folder: Path, files: tuple[Path, ...]) -> None:
    """Writes the pointer to a model's files, the first of which has the keys. OSError."""
    text = json.dumps({"files": [stamp_of(file) for file in files]}, indent=2)
    (folder / POINTER).write_text(text + "\n", encoding="utf-8")


def stamp_of(file: Path) -> dict[str, Any]:
    """Returns what the pointer says about a file. OSError."""
    status = file.stat()
    return {"path": str(file), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def pointed_files(folder: Path) -> tuple[Path, ...]:
    """Returns the GGUF files of a directory, () if it has no pointer. ModelLoadError if they are
    not there as they were."""
    source = folder / POINTER
    if not source.exists():
        return ()
    listed = read_json(source, max_bytes=_MAX_BYTES).get("files")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_SPLITS:
        raise ModelLoadError(f"{source}: files must list 1 to {MAX_SPLITS} files")
    return tuple(_checked(source, item) for item in listed)


def _checked(source: Path, item: object) -> Path:
    if not isinstance(item, dict):
        raise ModelLoadError(f"{source}: files must list objects")
    path = ConfigReader(item, str(source)).text("path")
    try:
        found = stamp_of(Path(path))
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{path}, of which {source.parent} was made: {why}") from error
    if found != item:
        raise ModelLoadError(f"{path} has changed since {source.parent} was made of it")
    return Path(path)
