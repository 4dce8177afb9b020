"""An optional list of a checkpoint's files with their SHA-256, checked before loading.

`sha256sum * > SHA256SUMS` in the model's directory writes the list. The check finds flipped bits
and replaced files; files that are not in the list are not checked.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from serve.checkpoint_json import read_bytes
from serve.errors import ModelLoadError, reason
from serve.regular_file import open_regular

MANIFEST = "SHA256SUMS"
MAX_MANIFEST_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\\\0]+)")


def check_manifest(path: Path) -> None:
    """Raises ModelLoadError if a file differs from the list; without a list it does nothing."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return
    lines = read_bytes(manifest, MAX_MANIFEST_BYTES).decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ModelLoadError(f"{manifest}, line {number}: not a SHA-256 and a file's name")
        digest, name = match.groups()
        if name != MANIFEST:
            _check(path / name, digest.lower(), manifest)


def _check(file: Path, digest: str, manifest: Path) -> None:
    try:
        with open_regular(file) as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{manifest} names {file.name}: {reason(error)}") from error
    if found != digest:
        raise ModelLoadError(f"{file} is damaged or another file: {MANIFEST} lists another hash")
