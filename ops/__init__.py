"""Tensor functions for one device, chosen once by name.

`get_backend("auto")` is the only place where "auto" is resolved. A back end's module is
imported when it is chosen, so that optional packages are needed only where they are used.
"""

from __future__ import annotations

import importlib
import logging

from ops.backend import Backend, Edges, KeyValues, LinearOp, Norm, Partial

logger = logging.getLogger(__name__)

BACKENDS = {
    "cpu": "ops.cpu:CpuBackend",
    "reference": "ops.reference:ReferenceBackend",
}

__all__ = [
    "BACKENDS",
    "Backend",
    "Edges",
    "KeyValues",
    "LinearOp",
    "Norm",
    "Partial",
    "get_backend",
]


def get_backend(name: str = "auto") -> Backend:
    """The back end of that name; ValueError names the known ones."""
    chosen = "cpu" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[chosen].partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    logger.info("ops backend: %s", backend.name)
    return backend
