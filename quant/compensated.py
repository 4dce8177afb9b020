"""int4 weights whose rounding errors are compensated by other inputs: GPTQ (arXiv 2210.17323).

The inputs of a product are correlated. Inputs are rounded one after the other, those with the
largest second moments first, and the weights of those that follow take over what an input's error
does to the results, as far as the second moments of the inputs say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.linear import searched_scales
from quant.int4 import Int4Weight

_DAMPING = (0.01, 0.1, 1.0)  # shares of the mean moment that are added; more, if that is too little
_BLOCK = 128  # inputs whose errors the inputs after them take over at once


def compensated_int4(weight: Tensor, moments: Tensor, group: int) -> Int4Weight:
    """Rounds weight: [out, in] in any float type, for inputs with these second moments.

    moments: [in, in] fp32, the sum of x x^T over rows x, or a multiple of it. The scales of groups
    are searched for the least error weighted by the moments. ValueError if moments are not finite
    or not those of any inputs.
    """
    num_out, num_in = weight.shape
    assert moments.shape == (num_in, num_in), f"{moments.shape} for {num_in} inputs"
    assert num_in % group == 0, f"{num_in} inputs in groups of {group}"
    order = moments.diagonal().argsort(descending=True, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_in))
    factor, importance = _inverse_factor(moments[order][:, order])
    parts = weight.float().reshape(num_out, -1, group)
    scales = _storable(searched_scales(parts, importance[place].reshape(-1, group)))
    steps = scales.repeat_interleave(group, 1)[:, order].t().contiguous()
    rest = weight.float()[:, order].t().contiguous()  # an input's weights side by side
    codes = torch.empty(num_in, num_out, dtype=torch.uint8)
    for start in range(0, num_in, _BLOCK):
        own = slice(start, start + _BLOCK)
        errors = _round_block(rest[own], steps[own], factor[own, own], codes[own])
        rest[own.stop :] -= factor[own, own.stop :].t() @ errors
    return Int4Weight(codes[place].t().contiguous(), scales, None, group)


def _round_block(block: Tensor, steps: Tensor, factor: Tensor, codes: Tensor) -> Tensor:
    """Rounds block: [inputs, out] to codes with scales `steps`, likewise, changing what is not
    rounded yet. Returns the errors that the inputs after the block take over, likewise."""
    errors = torch.empty_like(block)
    divisors = torch.where(steps == 0, 1.0, steps)
    for i, values in enumerate(block):
        rounded = (values / divisors[i]).round_().clamp_(-8, 7)
        codes[i] = rounded + 8
        errors[i] = (values - rounded * steps[i]) / factor[i, i]
        block[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]
    return errors


def _inverse_factor(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Returns U, upper triangular, with U^T U the inverse of the damped moments, and their
    diagonal; both fp32. Inputs that are always zero count as not correlated."""
    if not bool(torch.isfinite(moments).all()):
        raise ValueError("the second moments of the inputs are not finite")
    wide = moments.double()
    diagonal = wide.diagonal()
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal <= 0] = mean
    for damping in _DAMPING:
        damped = wide + damping * mean * torch.eye(len(wide), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper.float(), damped.diagonal().float() / mean
    raise ValueError("the second moments of the inputs are not positive")


def _storable(scales: Tensor) -> Tensor:
    """Returns scales rounded to the 11 bits that the kernels keep of them."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp((mantissa * 2048).round() / 2048, exponent)
