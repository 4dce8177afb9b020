"""Requests to the hub, each with a limit on everything that its answer can hold.

Redirects are followed by hand: the token goes to the hub itself and nowhere else, and an address
with encryption never leads to one without.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from serve.errors import DownloadError
from serve.hub.refusals import TransientError, refusal
from serve.hub.settings import DEFAULT_ENDPOINT, HubSettings, is_web_address

MAX_ANSWER_BYTES = 32 << 20
MAX_ANSWER_S = 60.0
RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
MAX_FIRST_TRIES = 3
_MAX_ERROR_BYTES = 1 << 16
_MAX_REDIRECTS = 5
_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_REDIRECTS = (301, 302, 303, 307, 308)
_LOGGERS = ("httpx", "httpx2", "httpcore", "httpcore2")  # they log addresses with signatures

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Stopped(Exception):
    """The download was told to stop."""


class HubClient:
    """Asks one hub for one repository. stop: ends all waiting when it is set."""

    def __init__(
        self, settings: HubSettings, repository: str, revision: str, stop: threading.Event
    ) -> None:
        from huggingface_hub import __version__, get_session
        from huggingface_hub.errors import HTTPError

        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.settings = settings
        self.repository = repository
        self.revision = revision
        self.stop = stop
        self._session = get_session()
        self._transport_error: type[Exception] = HTTPError
        self._agent = f"mergestep; huggingface_hub/{__version__}"
        hubs = (settings.endpoint, DEFAULT_ENDPOINT)
        self._trusted = {_origin(url) for url in hubs}

    def listing_address(self) -> str:
        path = f"{self.repository}/revision/{quote(self.revision, safe='')}"
        return f"{self.settings.endpoint}/api/models/{path}?blobs=true"

    def file_address(self, commit: str, path: str) -> str:
        return f"{self.settings.endpoint}/{self.repository}/resolve/{commit}/{quote(path)}"

    def read(self, url: str) -> bytes:
        """Returns the whole body of a small answer. DownloadError for one that is larger than
        MAX_ANSWER_BYTES or takes longer than MAX_ANSWER_S."""
        with self.open(url) as response:
            return self._read(response, MAX_ANSWER_BYTES)

    def retried(self, call: Callable[[], T]) -> T:
        """Calls until there is no transient failure. Raises that of the last of
        MAX_FIRST_TRIES calls, so that a command that finds no hub soon says so."""
        for failures in range(MAX_FIRST_TRIES - 1):
            try:
                return call()
            except TransientError as error:
                self.pause(failures, error)
        return call()

    def pause(self, failures: int, error: TransientError) -> None:
        """Waits before the next try, longer after more failures or as long as the hub wants."""
        wait_s = RETRY_WAITS_S[failures] if error.wait_s is None else error.wait_s
        logger.warning("%s; the next try is in %.0f s", error.cause, wait_s)
        self.wait(wait_s)

    def wait(self, seconds: float) -> None:
        """Waits. Raises Stopped as soon as the download is told to stop."""
        if self.stop.wait(seconds):
            raise Stopped

    @contextmanager
    def open(self, url: str, *, first: int = 0, last: int | None = None) -> Iterator[Any]:
        """Yields the response to a GET, of which no body is read yet.

        first, last: the numbers of the first and last byte that are wanted; the response may have
        them all. Raises DownloadError for a refusal, and its TransientError for a failure that
        another try may not meet, also while the caller reads the body.
        """
        headers = {"User-Agent": self._agent, "Accept-Encoding": "identity"}
        if first or last is not None:
            headers["Range"] = f"bytes={first}-{'' if last is None else last}"
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with self._session.stream(
                    "GET",
                    url,
                    headers=headers | self._credentials(url),
                    follow_redirects=False,
                    timeout=self.settings.timeout_s,
                ) as response:
                    if response.status_code not in _REDIRECTS:
                        self._check(url, response)
                        yield response
                        return
                    url = self._next(url, response.headers.get("Location", ""))
        except self._transport_error as error:
            raise self.lost(f"the connection to {_host(url)} failed ({_reason(error)})") from None
        raise self._odd(f"redirects more than {_MAX_REDIRECTS} times")

    def _credentials(self, url: str) -> dict[str, str]:
        if self.settings.token is None or _origin(url) not in self._trusted:
            return {}
        return {"Authorization": f"Bearer {self.settings.token}"}

    def _next(self, url: str, location: str) -> str:
        found = urljoin(url, location) if location.isascii() else ""
        if not is_web_address(found):
            raise self._odd("redirects to no address of the web")
        if url.startswith("https:") and not found.startswith("https:"):
            raise self._odd(f"redirects to {_host(found)} without encryption")
        return found

    def _check(self, url: str, response: Any) -> None:
        if response.status_code >= 400 and _origin(url) not in self._trusted:
            text = f"{_host(url)}, which sends the files of {self.settings.host}, answers"
            cause = f"{text} {response.status_code}"
            raise TransientError(cause, "try again later", code="server")
        if response.status_code >= 400:
            body = self._read(response, _MAX_ERROR_BYTES, is_cut=True)
            raise refusal(
                self.settings,
                self.repository,
                self.revision,
                response.status_code,
                response.headers,
                body,
            )
        if response.status_code not in (200, 206):
            raise self._odd(f"answers {response.status_code}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise self._odd("compresses its answer although it must not")

    def _read(self, response: Any, max_bytes: int, *, is_cut: bool = False) -> bytes:
        body = bytearray()
        end_s = time.monotonic() + MAX_ANSWER_S
        for chunk in response.iter_raw():
            if self.stop.is_set():
                raise Stopped
            body += chunk
            if len(body) > max_bytes and is_cut:
                return bytes(body[:max_bytes])
            if len(body) > max_bytes:
                raise self._odd(f"answers with more than {max_bytes >> 20} MiB")
            if time.monotonic() > end_s:
                raise self._odd(f"takes more than {MAX_ANSWER_S:.0f} s for an answer")
        return bytes(body)

    def _odd(self, what: str) -> DownloadError:
        return DownloadError(
            f"{self.settings.host} {what}, which no hub does; check HF_ENDPOINT and the proxy",
            code="refused",
        )

    def lost(self, cause: str) -> TransientError:
        """Returns the error for a connection that does not work."""
        advice = "check the network and the proxy (HTTPS_PROXY); models in the cache need neither"
        return TransientError(cause, advice, code="network")


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    text = _NUMBER.sub("", str(error)) or type(error).__name__
    return text[:200]


def _host(url: str) -> str:
    return urlsplit(url).netloc
