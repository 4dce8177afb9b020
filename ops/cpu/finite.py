"""A check of tensors for NaN and infinities."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu.native_library import is_available, library

# The bits of the exponent, in the first and the second number of 32 bits.
_EXPONENTS = {
    torch.float32: (0x7F800000, 0x7F800000),
    torch.bfloat16: (0x7F80, 0x7F800000),
    torch.float16: (0x7C00, 0x7C000000),
}


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no value is NaN or infinite.

    torch's threads would keep the processors busy for milliseconds after each call, while the
    native kernels pack what was checked.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    exponent = _EXPONENTS.get(tensor.dtype)
    if exponent is None or not is_available() or not tensor.is_contiguous():
        return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
    size_bytes = tensor.numel() * tensor.element_size()
    return bool(library().all_finite(tensor.data_ptr(), size_bytes, *exponent))
