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

# The masks of 8-bit types, and the least masked value of NaN and infinities.
_BYTES = {
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no value is NaN or infinite.

    torch's threads would keep the processors busy for milliseconds after each call, while the
    native kernels pack what was checked.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype in _BYTES:
        mask, least = _BYTES[tensor.dtype]
        return int((tensor.view(torch.uint8) & mask).max()) < least
    exponent = _EXPONENTS.get(tensor.dtype)
    if exponent is None or not is_available() or not tensor.is_contiguous():
        return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
    size_bytes = tensor.numel() * tensor.element_size()
    return bool(library().all_finite(tensor.data_ptr(), size_bytes, *exponent))
