"""Tensor functions for one device, chosen once by name.

This package owns the operators' contract and their back ends. It does not know requests, K/V ranges
or models, and it imports no other package of ours. Begin with backend.py, the contract, and
reference.py.

`get_backend("auto")` is the only place that resolves "auto". A back end's module is imported when
it is chosen, so that optional packages are only needed where they are used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os

import torch

from ops.backend import (
    Backend,
    Fusion,
    KeyValues,
    LinearOp,
    Norm,
    Partial,
    QuantizedLinears,
)

logger = logging.getLogger(__name__)

BACKENDS = {
    "cpu": "ops.cpu.backend:CpuBackend",
    "cuda": "ops.cuda.backend:CudaBackend",
    "reference": "ops.reference:ReferenceBackend",
}

MIN_TRITON = (3, 5)
MIN_CAPABILITY = (8, 0)  # the first GPUs with bf16 and int8 products on tensor cores

__all__ = [
    "BACKENDS",
    "Backend",
    "Fusion",
    "KeyValues",
    "LinearOp",
    "Norm",
    "Partial",
    "QuantizedLinears",
    "best_backend",
    "get_backend",
]


def best_backend() -> str:
    """Returns "cuda" if the kernels support torch's device and the optional packages are installed,
    else "cpu". It never chooses Triton's interpreter."""
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1":
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        logger.warning("%s is not used: compute capability %d.%d, not 8.0", name, *capability)
        return "cpu"
    missing = [name for name in ("triton", "cuda.bindings") if not _can_import(name)]
    if missing:
        reason = f"{' and '.join(missing)} cannot be imported"
    elif _triton_version() < MIN_TRITON:
        reason = _old_triton()
    else:
        return "cuda"
    logger.warning("the GPU is not used: %s (pip install 'mergestep[cuda]')", reason)
    return "cpu"


def _triton_version() -> tuple[int, ...]:
    """Returns (major, minor)."""
    parts = importlib.metadata.version("triton").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _old_triton() -> str:
    return f"triton is {importlib.metadata.version('triton')}, not 3.5 or later"


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False


def get_backend(name: str = "auto") -> Backend:
    """Returns the back end of that name. ValueError for an unknown name or a missing package."""
    chosen = best_backend() if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[chosen].partition(":")
    if chosen == "cuda" and _can_import("triton") and _triton_version() < MIN_TRITON:
        raise ValueError(f"{_old_triton()}: pip install 'mergestep[cuda]'")
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
