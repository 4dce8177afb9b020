"""An optional list of a checkpoint's files with their SHA-256, checked before loading.

`sha256sum * > SHA256SUMS` in the model's directory writes the list. The check finds flipped bits
and replaced files; files that are not in the list are not checked.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from serve.errors import ModelLoadError

MANIFEST = "SHA256SUMS"
MAX_MANIFEST_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\\\0]+)")


def check_manifest(path: Path) -> None:
    """Raises ModelLoadError if a file differs from the list; without a list it does nothing."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return
    if manifest.stat().st_size > MAX_MANIFEST_BYTES:
        raise ModelLoadError(f"{manifest} is larger than {MAX_MANIFEST_BYTES} bytes")
    lines = manifest.read_bytes().decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ModelLoadError(f"{manifest}, line {number}: not a SHA-256 and a file's name")
        digest, name = match.groups()
        if name != MANIFEST:
            _check(path / name, digest.lower(), manifest)


def _check(file: Path, digest: str, manifest: Path) -> None:
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{manifest} names {file.name}: {error.strerror}") from error
    if found != digest:
        raise ModelLoadError(f"{file} is damaged or another file: {MANIFEST} lists another hash")
