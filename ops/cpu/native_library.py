"""The compiled library of native kernels (ops/csrc): whether it is built, and its threads.

The library uses the best instruction set of the processor (AVX-512 VNNI, AVX2, else portable code).
The native_*.py files beside this one offer its kernels as functions of tensors: they check shapes,
then pass addresses.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

try:
    from ops import _native
except ImportError as error:  # a source tree that was never built
    _native = None  # type: ignore[assignment]
    _why = str(error)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The library's numbers of the element types."""
BEGIN, FINISH = 1, 2
"""The library's numbers of the two phases of attention (ops/csrc/kernels.h)."""


def is_available() -> bool:
    return _native is not None


def library() -> ModuleType:
    """Returns the compiled module. RuntimeError if it is not built."""
    if _native is None:
        raise RuntimeError(
            f"the native kernels are not built ({_why}); install the package with "
            "`pip install -e .`, which needs a C++ compiler"
        )
    return _native


def instruction_set() -> str:
    """Returns the kernels in use: avx512, avxvnni, avx2 or portable."""
    return str(library().instruction_set())


def num_threads() -> int:
    """Returns the size of the thread team, the caller included."""
    return int(library().num_threads())


def set_num_threads(n: int) -> None:
    """Sets the size of the thread team, at most the processors that this process may use."""
    library().set_num_threads(n)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
