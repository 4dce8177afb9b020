"""Attention of a device's steps, as what computes them describes it."""

from __future__ import annotations

import collections.abc as abc
from typing import Protocol

from torch import Tensor

from memory.attention.seam import Attention, AttentionStep
from ops.cuda.attention import PrefillChunk


class StepAttention(Protocol):
    """Attention whose steps are described in host memory that the runner uploads
    (memory/attention/cuda.py), or in messages to memory nodes (memory/nodes/cuda_attention.py)."""

    @property
    def num_words(self) -> int:
        """The int32 words of a host buffer."""

    def fill(
        self,
        host: Tensor,
        step: AttentionStep,
        num_rows: int,
        num_decodes: int,
        *,
        is_captured: bool,
    ) -> abc.Sequence[PrefillChunk]:
        """Writes a step, padded to these numbers, and returns its chunks for `view`."""

    def upload(self, host: Tensor) -> None:
        """Copies a filled buffer to the device, in the order of its work."""

    def view(
        self,
        num_rows: int,
        num_decodes: int,
        has_prompts: bool,
        chunks: abc.Sequence[PrefillChunk] = (),
    ) -> Attention:
        """Returns the attention of the step that was uploaded last."""
