"""The directory that stands for a model in a GGUF file.

It has config.json, generation_config.json and the files of the tokenizer, which are made of the
file's keys, and a pointer to the file. It is made once for each file and version of this code, in
$XDG_CACHE_HOME/mergestep/gguf (or below ~/.cache), which only this user can read and write.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from serve.errors import ModelLoadError, reason
from serve.models.gguf.config import config_values, sampling_values
from serve.models.gguf.pointer import POINTER, pointed_files, stamp_of, write_pointer
from serve.models.gguf.reader import read_gguf
from serve.single_file.find import gguf_file
from serve.single_file.names import stem_of
from serve.text.gguf_tokenizer import generation_ids, tokenizer_files

logger = logging.getLogger(__name__)

_KEPT_S = 30 * 24 * 3600.0  # unused directories are removed after this time
_CODE = ("models/gguf", "single_file", "text")  # what the contents depend on


class SingleFile(NamedTuple):
    """The directory of a model in a file, and the model's name."""

    directory: Path
    name: str


def single_file(path: Path, *, has_tokenizer: bool = False) -> SingleFile | None:
    """Returns the directory of a GGUF file, or of the only one in a directory; None for another
    model, or nothing. has_tokenizer: the tokenizer is another's, and not that of the file.

    ModelLoadError says what is wrong with the file, or that the cache cannot be written.
    """
    file = gguf_file(path)
    if file is None:
        return None
    return SingleFile(_directory(file, has_tokenizer=has_tokenizer), stem_of(file.name))


def _directory(file: Path, *, has_tokenizer: bool) -> Path:
    try:
        # links are kept: the names of the files of a split model matter
        real = file.absolute()
        root = _private_root()
        kept = root / f"{stem_of(file.name)[:80]}-{_key(real, has_tokenizer=has_tokenizer)}"
        if not _is_current(kept):
            _write(kept, real, has_tokenizer=has_tokenizer)
            _remove_unused(root)
        os.utime(kept)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ModelLoadError(f"{file}: no directory for it: {reason(error)}{where}") from error
    return kept


def _is_current(kept: Path) -> bool:
    """Returns whether the directory is there and the files are as they were."""
    if not (kept / POINTER).is_file():
        return False
    try:
        return bool(pointed_files(kept))
    except ModelLoadError:
        shutil.rmtree(kept, ignore_errors=True)
        return False


def _write(kept: Path, file: Path, *, has_tokenizer: bool) -> None:
    """Writes the directory whole or not at all."""
    model = read_gguf(file)
    config, generation = config_values(model), sampling_values(model)
    contents: dict[str, str] = {}
    try:
        ids = generation_ids(model.metadata)
        config |= {key: value for key, value in ids.items() if key == "bos_token_id"}
        generation |= ids
        if not has_tokenizer:
            contents |= tokenizer_files(model.metadata)
    except ValueError as error:
        if not has_tokenizer:
            raise ModelLoadError(f"{file}: the file {error}") from error
    contents |= {"config.json": _json(config), "generation_config.json": _json(generation)}
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=kept.parent))
    try:
        for name, content in contents.items():
            (made / name).write_text(content, encoding="utf-8")
        write_pointer(made, model.files)
        with contextlib.suppress(FileExistsError):
            _rename(made, kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    logger.info("%s describes %s", kept, file)


def _rename(made: Path, kept: Path) -> None:
    try:
        made.rename(kept)
    except OSError:
        if not (kept / POINTER).is_file():  # another process has not just made it
            raise


def _json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _key(real: Path, *, has_tokenizer: bool) -> str:
    """Returns what tells directories apart: the file's path, size and time, and the code."""
    told = json.dumps([stamp_of(real), has_tokenizer, _code_version()])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@functools.cache
def _code_version() -> str:
    """Returns a hash of the code that writes the contents."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in _CODE:
        for source in sorted((package / folder).glob("*.py")):
            if folder != "text" or source.name.startswith("gguf"):
                digest.update(source.read_bytes())
    return digest.hexdigest()


def _private_root() -> Path:
    """Returns the folder of all directories. OSError if it cannot be made, PermissionError if
    another user can write to it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(f"there is no home directory ({error}); set XDG_CACHE_HOME") from error
    root = cache / "mergestep" / "gguf"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(0, "it is not this user's folder", str(root))
    if stat.S_IMODE(status.st_mode) & 0o077:
        root.chmod(0o700)
    return root


def _remove_unused(root: Path) -> None:
    oldest = time.time() - _KEPT_S
    for item in root.iterdir():
        with contextlib.suppress(OSError):
            if item.lstat().st_mtime < oldest and item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
