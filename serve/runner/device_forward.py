"""Computes rows of a model that drafts on a device, in CUDA graphs where the target has them.

It shares the target's queue, and computes between two of its steps, when the host knows all tokens.
So it has one step at a time, and waits for it.
"""

from __future__ import annotations

import collections.abc as abc
import logging
from functools import partial

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep
from ops.cuda.attention import PrefillChunk
from serve.models import Decoder
from serve.runner.graph_shapes import StepShape, StepShapes
from serve.runner.step_attention import StepAttention
from serve.runner.step_device import StepDevice, Work

logger = logging.getLogger(__name__)

_NOTHING = AttentionStep(0, [], [], [])
_FIELDS = 3  # of a row: its token, its position, and which row is sampled in its place


class DeviceForward:
    """Implements Forward (forward.py) on a step device. Only the compute thread calls it."""

    def __init__(
        self,
        model: Decoder,
        attention: StepAttention,
        device: StepDevice,
        shapes: StepShapes,
    ) -> None:
        self._model, self._attention = model, attention
        self._device, self._shapes = device, shapes
        words = _FIELDS * shapes.max_rows
        self._rows = torch.zeros(words, dtype=torch.int64, device=device.device)
        self._host_rows = device.pinned(8 * words).view(torch.int64)
        self._host_attention = device.pinned(4 * attention.num_words).view(torch.int32)
        self._sampled = torch.empty(
            shapes.max_sampled, model.spec.hidden_size, dtype=model.dtype, device=device.device
        )
        self._graphs: dict[StepShape, Work] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Computes steps of all shapes without a sequence, so that no kernel is compiled while a
        request waits, and captures the graphs of the shapes that gain from it."""
        can_capture = True
        for shape in [*self._shapes.eager, *self._shapes.captured]:
            chunks = self._fill([], [], _NOTHING, [], shape)
            self._upload(shape)
            self._body(shape, chunks)
            if shape.is_captured and can_capture:
                can_capture = self._capture(shape)
            self._device.wait()  # the buffers are filled again at once
        for count in self._shapes.sampled:
            self._model.logits(self._sampled[:count])
        self._device.wait()

    def _capture(self, shape: StepShape) -> bool:
        """Captures a shape; returns whether it succeeded. A step without a graph is slower but
        correct."""
        try:
            self._graphs[shape] = self._device.capture(partial(self._body, shape))
        except Exception:
            logger.warning("no more CUDA graphs: %s cannot be captured", shape, exc_info=True)
            return False
        return True

    def __call__(
        self,
        input_ids: list[int],
        positions: list[int],
        step: AttentionStep,
        ends: abc.Sequence[int],
    ) -> Tensor | None:
        has_prompts = len(step.num_rows) > step.num_decodes
        shape = self._shapes.fitting(len(input_ids), step.num_decodes, has_prompts=has_prompts)
        chunks = self._fill(input_ids, positions, step, ends, shape)
        found: list[Tensor] = []
        work = partial(self._compute, shape, chunks, len(ends), found)
        self._device.submit(work).wait()
        return found[0].cpu() if found else None

    def _fill(
        self,
        input_ids: list[int],
        positions: list[int],
        step: AttentionStep,
        ends: abc.Sequence[int],
        shape: StepShape,
    ) -> abc.Sequence[PrefillChunk]:
        """Writes a step to the host's buffers, which no step in flight reads."""
        block = self._host_rows[: _FIELDS * shape.rows].view(_FIELDS, shape.rows).zero_()
        for row, values in enumerate((input_ids, positions, ends)):
            block[row, : len(values)] = torch.tensor(values, dtype=torch.int64)
        return self._attention.fill(
            self._host_attention, step, shape.rows, shape.decodes, is_captured=shape.is_captured
        )

    def _upload(self, shape: StepShape) -> None:
        size = _FIELDS * shape.rows
        self._rows[:size].copy_(self._host_rows[:size], non_blocking=True)
        self._attention.upload(self._host_attention)

    @torch.inference_mode()
    def _compute(
        self,
        shape: StepShape,
        chunks: abc.Sequence[PrefillChunk],
        num_sampled: int,
        found: list[Tensor],
    ) -> None:
        """Launches the device's work. found: gets the logits."""
        self._upload(shape)
        graph = self._graphs.get(shape)
        if graph is None:
            self._body(shape, chunks)
        else:
            graph()
        if num_sampled:
            found.append(self._model.logits(self._sampled[:num_sampled]))

    def _body(self, shape: StepShape, chunks: abc.Sequence[PrefillChunk] = ()) -> None:
        """Runs the model on the uploaded rows and keeps the hidden states of the sampled ones."""
        ids, positions, ends = self._rows[: _FIELDS * shape.rows].view(_FIELDS, shape.rows)
        attention = self._attention.view(shape.rows, shape.decodes, shape.has_prompts, chunks)
        hidden = self._model.forward(ids, positions, attention)
        count = min(shape.rows, self._shapes.max_sampled)
        torch.index_select(hidden, 0, ends[:count], out=self._sampled[:count])
