"""The OpenAI-compatible HTTP API: parse at the edge, stream at the end, nothing in between.

schema.py turns JSON into SamplingParams, sse.py and shapes.py turn deltas into answers,
app.py connects both to an Engine, server.py owns the listener and its life. The packages
below know no HTTP.
"""

from serve.http.server import HttpServer
from serve.http.settings import HttpSettings

__all__ = ["HttpServer", "HttpSettings"]
