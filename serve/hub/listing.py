"""What a repository holds at one commit, read from the hub's answer, which nothing is taken from
unchecked."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import orjson

from serve.errors import DownloadError
from serve.hub.client import HubClient
from serve.hub.name import is_safe_path

MAX_FILES = 100_000
MAX_FILE_BYTES = 1 << 44
_SHA1 = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository. digest: the SHA-256 of a large file, or the SHA-1 that git gives a
    small one; it is the blob's name in the cache, too."""

    path: str
    size: int
    digest: str

    def new_hash(self) -> Any:
        """Returns the hash object whose hexdigest of the whole content is `digest`."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """commit: 40 hexadecimal digits. files: by path; names says of all files, also of those whose
    sizes or digests are unknown, that they are there."""

    repository: str
    commit: str
    files: dict[str, RepoFile]


def read_listing(client: HubClient) -> Listing:
    """Asks for the files of the client's repository and revision. DownloadError."""
    body = client.retried(lambda: client.read(client.listing_address()))
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _wrong(client, "no JSON") from error
    commit = answer.get("sha") if isinstance(answer, dict) else None
    if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
        raise _wrong(client, "no commit")
    entries = answer.get("siblings")
    if not isinstance(entries, list) or len(entries) > MAX_FILES:
        raise _wrong(client, f"no list of at most {MAX_FILES:,} files")
    files = {}
    for entry in entries:
        file = _file(client, entry)
        if file is not None:
            files[file.path] = file
    return Listing(client.repository, commit, files)


def _file(client: HubClient, entry: Any) -> RepoFile | None:
    """Returns the file of an entry; None for a path that git allows and other systems do not."""
    if not isinstance(entry, dict) or not isinstance(path := entry.get("rfilename"), str):
        raise _wrong(client, "a file without a path")
    if path.startswith("/") or ".." in path.split("/"):
        raise _wrong(client, f"a file {path[:80]!r} outside the repository")
    if not is_safe_path(path):
        return None
    large = entry.get("lfs")
    size, digest, pattern = entry.get("size"), entry.get("blobId"), _SHA1
    if isinstance(large, dict):
        size, digest, pattern = large.get("size"), large.get("sha256"), _SHA256
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise _wrong(client, f"no possible size of {path}")
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _wrong(client, f"no checksum of {path}")
    return RepoFile(path, size, digest)


def _wrong(client: HubClient, what: str) -> DownloadError:
    return DownloadError(
        f"{client.settings.host} lists {what} for {client.repository}; check HF_ENDPOINT",
        code="refused",
    )
