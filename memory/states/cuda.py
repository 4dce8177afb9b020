"""States in a CUDA device's memory, and attention beside them.

The segments of a step are written to host memory beside its attention and uploaded with it. How
many there are with padding, and where, depends on the step's padded rows alone, so that a captured
CUDA graph can be launched again for other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.attention.cuda import CudaAttention, CudaPlan
from memory.attention.seam import AttentionStep, Finished, Rotation, Ticket
from memory.states.layout import StateLayout
from memory.states.records import LayerRecords, RecordStates, layers_in_records
from memory.states.segments import cuts
from ops.cuda.attention import PrefillChunk
from ops.states import NO_RECORD, StateSegments

_WORDS = 2  # int32 words of a number


class CudaStates:
    """The states of all records, and buffers for the segments of a step. They hold one step at a
    time, in the order of the device's work.

    A host buffer is the count of the numbers that follow, and those: the columns of StateSegments.
    Segments and sequences that a step does not have are empty and at their ends.
    """

    def __init__(self, layout: StateLayout, flat: Tensor, *, max_rows: int, max_seqs: int) -> None:
        """flat: the records in the device's memory, [values] fp32; what a step reads and writes is
        mapped. max_rows, max_seqs: those of a step with its padding."""
        self._interval = layout.interval
        self._max_seqs = max_seqs
        self.layers = layers_in_records(layout, flat)
        most = sum(_aligned(self._sizes(max_rows)))
        self.num_words = _WORDS * (1 + most)
        self._buffer = torch.zeros(most, dtype=torch.int64, device=flat.device)

    def _sizes(self, num_rows: int) -> tuple[int, int, int, int]:
        """Returns the sizes of the columns for num_rows rows, however sequences share them. Rows of
        one sequence are cut at most twice, and where an interval lies between."""
        num_seqs = min(self._max_seqs, num_rows)
        num_segments = min(num_rows, 2 * num_seqs + num_rows // self._interval)
        return num_segments + 1, num_segments, num_segments, num_seqs + 1

    def fill(self, host: Tensor, step: AttentionStep, num_rows: int) -> None:
        """Writes the segments of a step, padded to num_rows rows, to host memory, [num_words]
        int32. Decoding sequences have one row each."""
        numbers: NDArray[np.int64] = host.view(torch.int64).numpy()
        sizes = self._sizes(num_rows)
        ends = np.cumsum(_aligned(sizes))
        numbers[0] = ends[-1]
        firsts, sources, targets, begins = np.split(numbers[1 : 1 + ends[-1]], ends[:-1])
        n = step.num_decodes
        assert sum(step.num_rows[:n]) == n, "no drafts"
        length = np.asarray(step.kv_lens[:n], np.int64)
        record = np.asarray(step.starts[:n], np.int64) + length
        firsts[:n] = begins[:n] = np.arange(n)
        sources[:n] = np.where(length > 1, (record - 2) // self._interval, NO_RECORD)
        targets[:n] = (record - 1) // self._interval
        row = segment = n
        for index in range(n, len(step.starts)):
            end = step.kv_lens[index]
            begins[index] = segment
            first = end - step.num_rows[index]
            for rows, source, target in cuts(step.starts[index], first, end, self._interval):
                firsts[segment], sources[segment], targets[segment] = row, source, target
                row, segment = row + rows, segment + 1
        firsts[segment:] = row
        sources[segment:] = targets[segment:] = NO_RECORD
        begins[len(step.starts) :] = segment

    def upload(self, host: Tensor) -> None:
        """Copies a filled host buffer to the device, in the order of its work."""
        numbers = host.view(torch.int64)
        count = int(numbers[0])
        self._buffer[:count].copy_(numbers[1 : 1 + count], non_blocking=True)

    def segments(self, num_rows: int) -> StateSegments:
        """Returns those of steps that were filled for num_rows rows."""
        sizes = self._sizes(num_rows)
        aligned = _aligned(sizes)
        columns = torch.split(self._buffer[: sum(aligned)], aligned)
        return StateSegments(*(column[:size] for column, size in zip(columns, sizes, strict=True)))


def _aligned(sizes: Sequence[int]) -> list[int]:
    """Returns the numbers that each column takes, so that all begin at multiples of 16 bytes:
    kernels are compiled for what is a multiple and for what is not."""
    return [size + size % 2 for size in sizes]


class CudaStatefulAttention:
    """CudaAttention for a model whose other layers have states. A host buffer has the words of
    attention, and then those of the states."""

    is_remote = False

    def __init__(self, attention: CudaAttention, states: CudaStates) -> None:
        self._attention = attention
        self._states = states
        self._host = torch.zeros(self.num_words, dtype=torch.int32)

    @property
    def num_words(self) -> int:
        return self._states_at + self._states.num_words

    @property
    def _states_at(self) -> int:
        return -(-self._attention.num_words // _WORDS) * _WORDS

    def _parts(self, host: Tensor) -> tuple[Tensor, Tensor]:
        return host[: self._attention.num_words], host[self._states_at :]

    def plan(self, step: AttentionStep) -> CudaStatefulPlan:
        """Plans exactly these rows and uploads them. The device has finished the previous step."""
        num_rows, num_decodes = sum(step.num_rows), step.num_decodes
        chunks = self.fill(self._host, step, num_rows, num_decodes, is_captured=False)
        self.upload(self._host)
        return self.view(num_rows, num_decodes, len(step.num_rows) > num_decodes, chunks)

    def fill(
        self,
        host: Tensor,
        step: AttentionStep,
        num_rows: int,
        num_decodes: int,
        *,
        is_captured: bool,
    ) -> Sequence[PrefillChunk]:
        """Does what CudaAttention.fill does, for the states too."""
        of_attention, of_states = self._parts(host)
        self._states.fill(of_states, step, num_rows)
        return self._attention.fill(
            of_attention, step, num_rows, num_decodes, is_captured=is_captured
        )

    def upload(self, host: Tensor) -> None:
        of_attention, of_states = self._parts(host)
        self._attention.upload(of_attention)
        self._states.upload(of_states)

    def view(
        self,
        num_rows: int,
        num_decodes: int,
        has_prompts: bool,
        chunks: Sequence[PrefillChunk] = (),
    ) -> CudaStatefulPlan:
        """Returns the plan for steps that were filled for num_rows rows. The device reads the rows
        when it runs the plan."""
        attention = self._attention.view(num_rows, num_decodes, has_prompts, chunks)
        return CudaStatefulPlan(attention, self._states.layers, self._states.segments(num_rows))


class CudaStatefulPlan:
    """Attention for one step's rows, and their states."""

    def __init__(
        self, attention: CudaPlan, layers: Sequence[LayerRecords], segments: StateSegments
    ) -> None:
        self._attention = attention
        self.states = RecordStates(layers, segments)

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return self._attention.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        return self._attention.finish(ticket, k, v, rotation)
