"""Fetches a model from the hub into the cache of Hugging Face's tools."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from serve.checkpoint_json import read_json
from serve.errors import DownloadError, ModelLoadError, reason
from serve.hub.cache import CONFIG, INDEX, RepoCache, repo_cache
from serve.hub.choice import wanted_files
from serve.hub.client import HubClient, Stopped
from serve.hub.listing import Listing, RepoFile, read_listing
from serve.hub.name import HubName, check_revision
from serve.hub.progress import DownloadProgress
from serve.hub.settings import HubSettings
from serve.hub.transfer import fetch_blob, has_blob, partial_bytes
from serve.units import format_memory

MAX_TRANSFERS = 4
LEFT_FREE_BYTES = 256 << 20
_MAX_INDEX_BYTES = 64 << 20

Tell = Callable[[str], None]


def pull(
    name: HubName,
    settings: HubSettings,
    *,
    revision: str | None = None,
    tell: Tell = lambda _: None,
    is_quiet: bool = False,
) -> Path:
    """Fetches what a model needs and is not in the cache yet. Returns its directory in the cache,
    or its first GGUF file.

    revision: a branch, tag or commit, by default "main". tell: is told in a sentence what is
    fetched from where, if anything is. is_quiet: shows no progress. Raises DownloadError, which
    says what to do, and ConfigError for the revision. What has been fetched when it ends early is
    kept, and the next call goes on from there.
    """
    revision = check_revision(revision or "main")
    if settings.is_offline:
        raise DownloadError(
            f"{name} is not in the cache {settings.cache}, and HF_HUB_OFFLINE forbids to fetch it",
            code="offline",
        )
    stop = threading.Event()
    client = HubClient(settings, name.repository, revision, stop)
    try:
        return _Pull(name, client, tell, is_quiet=is_quiet).run()
    except OSError as error:
        raise DownloadError(
            f"cannot write to the cache {settings.cache}: {reason(error)}; HF_HOME names another",
            code="disk",
        ) from error
    finally:
        stop.set()


class _Pull:
    """One call of `pull`."""

    def __init__(self, name: HubName, client: HubClient, tell: Tell, *, is_quiet: bool) -> None:
        self._name = name
        self._client = client
        self._tell = tell
        self._is_quiet = is_quiet
        self._cache: RepoCache = repo_cache(client.settings.cache, name.repository)

    def run(self) -> Path:
        listing = read_listing(self._client)
        wanted = wanted_files(
            listing, self._name.choice, lambda file: self._read_index(listing, file)
        )
        self._fetch(listing, wanted.files)
        # the configuration last: with it a directory counts as a model
        for file in sorted(wanted.files, key=lambda file: file.path == CONFIG):
            self._cache.link(listing.commit, file.path, file.digest)
        self._cache.set_ref(self._client.revision, listing.commit)
        return self._cache.snapshot(listing.commit) / wanted.first

    def _read_index(self, listing: Listing, file: RepoFile) -> dict[str, Any]:
        if file.size > _MAX_INDEX_BYTES:
            raise DownloadError(
                f"{listing.repository} lists {format_memory(file.size)} for {INDEX}", code="refused"
            )
        self._cache.make()
        self._fetch_file(listing, file, lambda done: None)
        try:
            return read_json(self._cache.blobs / file.digest, max_bytes=_MAX_INDEX_BYTES)
        except ModelLoadError as error:
            raise DownloadError(
                f"{listing.repository}: {INDEX} is not a JSON object", code="refused"
            ) from error

    def _fetch(self, listing: Listing, files: Sequence[RepoFile]) -> None:
        blobs = self._cache.blobs
        missing = list({f.digest: f for f in files if not has_blob(blobs, f)}.values())
        if not missing:
            return
        total = sum(file.size for file in missing)
        kept = sum(partial_bytes(blobs, file) for file in missing)
        self._check_disk(total - kept)
        self._announce(len(missing), total, kept)
        self._cache.make()
        progress = DownloadProgress(str(self._name), total, kept, is_shown=not self._is_quiet)
        for file in missing:
            progress.report(file.digest, partial_bytes(blobs, file))
        try:
            self._fetch_all(listing, missing, progress)
        finally:
            progress.close()

    def _check_disk(self, needed: int) -> None:
        cache = self._client.settings.cache
        existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed + LEFT_FREE_BYTES > free:
            raise DownloadError(
                f"{self._name} needs {format_memory(needed)} more, and {format_memory(free)} are"
                f" free on the disk of {cache}; make room, or set HF_HOME to another disk",
                code="disk",
            )

    def _announce(self, num_files: int, total: int, kept: int) -> None:
        settings = self._client.settings
        files = "1 file" if num_files == 1 else f"{num_files} files"
        here = f" ({format_memory(kept)} of it are here already)" if kept else ""
        self._tell(
            f"downloading {self._name} from {settings.endpoint}: {format_memory(total)} in"
            f" {files}{here}, to {settings.cache}"
        )

    def _fetch_all(
        self, listing: Listing, files: Sequence[RepoFile], progress: DownloadProgress
    ) -> None:
        """Fetches the files with several threads. The first error stops all of them.

        The threads are daemons, since a read from the network may not end when the program shall.
        """
        waiting: queue.SimpleQueue[RepoFile] = queue.SimpleQueue()
        for file in sorted(files, key=lambda file: file.size, reverse=True):
            waiting.put(file)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                while not self._client.stop.is_set():
                    file = waiting.get_nowait()
                    self._fetch_file(listing, file, partial(progress.report, file.digest))
            except queue.Empty:
                ended.put(None)
            except BaseException as error:
                ended.put(error)
            else:
                ended.put(Stopped())

        threads = [
            threading.Thread(target=work, name="download", daemon=True)
            for _ in range(min(MAX_TRANSFERS, len(files)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                error = ended.get()
                if error is not None:
                    raise error
        finally:
            self._client.stop.set()

    def _fetch_file(self, listing: Listing, file: RepoFile, report: Callable[[int], None]) -> None:
        url = self._client.file_address(listing.commit, file.path)
        fetch_blob(self._client, url, file, self._cache.blobs, self._cache.locks, report)
