"""What the hub's refusals mean, and what a user can do about each.

The hub answers 401 both for what does not exist and for what the token may not see. The header
X-Error-Code tells gated repositories, missing ones and missing revisions apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from serve.errors import DownloadError
from serve.hub.settings import HubSettings

MAX_WAIT_S = 120
"""The longest pause that the hub may ask for before the next try."""
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})')
_MAX_MESSAGE = 200


class TransientError(DownloadError):
    """A failure after which the same request may succeed. cause: what happened, without what to
    do. wait_s: how long the hub asks to wait."""

    def __init__(self, cause: str, advice: str, *, code: str, wait_s: float | None = None):
        super().__init__(f"{cause}; {advice}", code=code)
        self.cause = cause
        self.wait_s = wait_s


def refusal(
    settings: HubSettings,
    repository: str,
    revision: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
) -> DownloadError:
    """Returns the error for an answer whose status is 400 or above."""
    kind = headers.get("X-Error-Code", "")
    said = _message(settings, headers, body)
    if status in (408, 429) or status >= 500:
        return _transient(settings, status, headers, said)
    if kind == "GatedRepo":
        return _gated(settings, repository)
    if kind == "RevisionNotFound":
        text = f"{repository} has no revision {revision} on {settings.host}; see the branches and"
        return DownloadError(
            f"{text} tags at {settings.endpoint}/{repository}/tree/main", code="revision"
        )
    if kind == "EntryNotFound":
        return DownloadError(
            f"{repository} lists a file that {settings.host} does not have; try again later",
            code="not_found",
        )
    if status == 401 and settings.token and kind != "RepoNotFound":
        return DownloadError(
            f"{settings.host} does not accept the token: HF_TOKEN, or that of `hf auth login`, is"
            f" wrong or has expired; make a new one at {settings.endpoint}/settings/tokens",
            code="token",
        )
    if status in (401, 404):
        return _missing(settings, repository)
    if status == 403:
        return DownloadError(
            f"{settings.host} forbids access to {repository}{said}; the token may lack the right"
            f" to read it: see {settings.endpoint}/settings/tokens",
            code="forbidden",
        )
    return DownloadError(f"{settings.host} refuses {repository} ({status}){said}", code="server")


def _transient(
    settings: HubSettings, status: int, headers: Mapping[str, str], said: str
) -> DownloadError:
    if status != 429:
        return TransientError(
            f"{settings.host} answers {status}{said}", "try again later", code="server"
        )
    wait_s = _wait(headers)
    advice = "" if settings.token else ", or set HF_TOKEN: known users may ask more often"
    when = "later" if wait_s is None else f"in {wait_s} s"
    cause, advice = f"{settings.host} refuses more requests for now", f"try again {when}{advice}"
    if wait_s is not None and wait_s > MAX_WAIT_S:
        return DownloadError(f"{cause}; {advice}", code="rate_limited")
    return TransientError(cause, advice, code="rate_limited", wait_s=wait_s)


def _wait(headers: Mapping[str, str]) -> int | None:
    """Returns the seconds of Retry-After, or those until the hub's window of requests ends."""
    after = headers.get("Retry-After", "").strip()
    if after.isdecimal() and len(after) <= 6:
        return int(after)
    limit = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return int(limit[1]) if limit else None


def _gated(settings: HubSettings, repository: str) -> DownloadError:
    step = "with that account's token in HF_TOKEN or after `hf auth login`"
    if settings.token:
        step = "since the account of the token that was sent has no access yet"
    return DownloadError(
        f"{repository} is gated: ask for access at {settings.endpoint}/{repository}, and try again"
        f" {step}",
        code="gated",
    )


def _missing(settings: HubSettings, repository: str) -> DownloadError:
    step = "set HF_TOKEN or log in with `hf auth login`"
    if settings.token:
        step = "use the token of an account that may read it"
    return DownloadError(
        f"{settings.host} has no model {repository}, or it is private; if it is private, {step}",
        code="not_found",
    )


def _message(settings: HubSettings, headers: Mapping[str, str], body: bytes) -> str:
    """Returns the hub's own words, without the token that it may repeat."""
    text = headers.get("X-Error-Message", "")
    if not text:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            text = answer["error"]
    if settings.token:
        text = text.replace(settings.token, "***")
    text = "".join(char if char.isprintable() else " " for char in text[:_MAX_MESSAGE]).strip()
    return f": {text}" if text else ""
