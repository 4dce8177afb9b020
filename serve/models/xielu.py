"""The activation xIELU (arXiv 2411.13010), which has two learned numbers in each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import LinearOp
from serve.models.tensors import TensorSource


@dataclass(slots=True)
class Xielu:
    """A LinearOp that applies the activation to the result of another one.

    For x > 0: a_p x^2 + b x, else a_n (expm1(min(x, eps)) - x) + b x, with a_p = softplus(alpha_p)
    and a_n = b + softplus(alpha_n).
    """

    op: LinearOp
    positive: Tensor
    negative: Tensor
    beta: Tensor
    eps: Tensor

    @staticmethod
    def after(op: LinearOp, module: str, source: TensorSource) -> Xielu:
        """Reads the activation's numbers, which have the names of `module`."""
        wide = torch.float32
        positive, negative, beta, eps = (
            source.vector(f"{module}.{name}", shape, dtype=wide)
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
        )
        if positive is not None:
            positive = functional.softplus(positive)
            negative = beta + functional.softplus(negative)
        return Xielu(op, positive, negative, beta, eps)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None, "an activation comes before another product"
        y = self.op(x)
        wide = y.float()
        low = self.negative * (torch.expm1(torch.minimum(wide, self.eps)) - wide)
        high = self.positive * wide * wide
        return (torch.where(wide > 0, high, low) + self.beta * wide).to(y.dtype)
