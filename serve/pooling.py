"""Parameters of an embedding request, and the arrays that a prompt's own rows give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from serve.errors import RequestError
from serve.sampling_params import SamplingParams

POOLING_KINDS = ("mean", "last")
MAX_DIMENSIONS = 1 << 20

Vector = npt.NDArray[np.float32]
LogprobRows = npt.NDArray[np.void]
"""[R] records of log-probabilities, with the fields of ops.cpu.sampling.SampledRows."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Determines how a prompt's final hidden states become one embedding vector.

    kind: "mean" of all tokens, or the "last" token. normalize: scale the vector to length 1.
    dimensions: keep only the first so many, before normalizing; None keeps all. cache_salt and
    priority are as in SamplingParams.
    """

    kind: str = "mean"
    normalize: bool = True
    dimensions: int | None = None
    cache_salt: str | None = None
    priority: int = 0

    n: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.kind not in POOLING_KINDS:
            raise RequestError('kind must be "mean" or "last"', param="kind")
        if not isinstance(self.normalize, bool):
            raise RequestError(
                "normalize must be true or false", param="normalize", code="invalid_type"
            )
        if type(self.dimensions) not in (int, type(None)):
            raise RequestError("dimensions must be an integer", param="dimensions")
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise RequestError(
                f"dimensions must be between 1 and {MAX_DIMENSIONS}", param="dimensions"
            )
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters of a request that samples no token."""
        return SamplingParams(
            max_tokens=0,
            temperature=0.0,
            seed=0,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )
