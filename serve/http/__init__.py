"""The HTTP server: OpenAI's and Anthropic's APIs over one Engine.

It owns the listener and its life (server.py), the way from a request to its endpoint (app.py,
routes.py), and in its folders the checks before a body is read (edge), the fields of bodies
(schema), one call on the engine (calls), the APIs (openai, responses, anthropic) and what operators
see (monitoring). It does not know how models are loaded or run; the packages below it know no
HTTP. Begin with app.py and openai/chat_endpoint.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.http.edge.settings import HttpSettings

if TYPE_CHECKING:
    from serve.http.server import HttpServer

__all__ = ["HttpServer", "HttpSettings"]


def __getattr__(name: str) -> Any:
    """Imports the server on demand: the command line needs only the settings and starts fast."""
    if name != "HttpServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve.http.server import HttpServer

    return HttpServer
