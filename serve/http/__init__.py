"""The OpenAI-compatible HTTP API: parse at the edge, stream at the end, nothing in between.

schema.py turns JSON into SamplingParams, sse.py and shapes.py turn deltas into answers,
app.py connects both to an Engine, server.py owns the listener and its life. The packages
below know no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.http.edge.settings import HttpSettings

if TYPE_CHECKING:
    from serve.http.server import HttpServer

__all__ = ["HttpServer", "HttpSettings"]


def __getattr__(name: str) -> Any:
    """The server on demand: the command line needs only the settings, and is quick to start."""
    if name != "HttpServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve.http.server import HttpServer

    return HttpServer
