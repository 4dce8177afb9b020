"""Tensor functions for one device, chosen once by name.

`get_backend("auto")` is the only place where "auto" is resolved. A back end's module is
imported when it is chosen, so that optional packages are needed only where they are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging

import torch

from ops.backend import (
    Backend,
    Edges,
    KeyValues,
    LinearOp,
    Norm,
    Partial,
    QuantizedLinears,
)

logger = logging.getLogger(__name__)

BACKENDS = {
    "cpu": "ops.cpu:CpuBackend",
    "cuda": "ops.cuda:CudaBackend",
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
    "QuantizedLinears",
    "best_backend",
    "get_backend",
]


def best_backend() -> str:
    """ "cuda" where torch has a device and the optional packages are there, else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    missing = [name for name in ("triton", "cuda") if importlib.util.find_spec(name) is None]
    if missing:
        logger.warning(
            "there is a CUDA device, but %s cannot be imported: pip install 'mergestep[cuda]'",
            " and ".join(missing),
        )
        return "cpu"
    return "cuda"


def get_backend(name: str = "auto") -> Backend:
    """The back end of that name; ValueError names the known ones, or why it cannot be had."""
    chosen = best_backend() if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[chosen].partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{chosen} needs a package that cannot be imported ({error}): "
            f"pip install 'mergestep[{chosen}]'"
        ) from error
    backend: Backend = getattr(found, attribute)()
    logger.info("ops backend: %s", backend.name)
    return backend
