"""The address of a server, from what people give as its URL."""

from __future__ import annotations

import re

_API_PATH = re.compile(
    r"(?<!/)/v1(/(chat/completions|completions|responses|messages|embeddings|models))?/*$"
)


def server_root(url: str) -> str:
    """Returns the URL before the paths of the API, with a scheme. It may be given as the root
    (`host:8000`), as clients want it (`http://host:8000/v1`), or with the path of an endpoint
    (`http://host:8000/v1/chat/completions`)."""
    url = url.strip()
    return _API_PATH.sub("", url if "://" in url else f"http://{url}").rstrip("/")
