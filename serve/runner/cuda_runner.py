"""Computes steps on a CUDA device, and launches each before the host has the last one's tokens.

A step has three parts on one stream: the upload of its rows (two copies from pinned memory), the
model (a CUDA graph if the step's shape was captured, else kernel by kernel), and the sampling. The
tokens stay on the device for the next step and are copied to pinned memory for the host. Only
`PendingStep.wait` waits for the tokens.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep, single_rows
from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.pages.kv_range import Range
from ops.cuda.attention import PrefillChunk
from ops.cuda.device_sampler import DeviceSampler, Fetched, Kind, SamplingPlan
from serve.models import Decoder
from serve.runner.batch import selected_by
from serve.runner.draft_rows import sampler_rows
from serve.runner.graph_shapes import StepShape, StepShapes
from serve.runner.mask_filler import NO_SEQUENCES, FillingMasks, MaskFiller, has_masks
from serve.runner.prompt_reader import PromptReader, PromptRowRequest, prompt_row_requests
from serve.runner.runner import (
    MAP_AHEAD_EVERY,
    Closable,
    Follower,
    StepResult,
    upcoming_tokens,
)
from serve.runner.sampling_rows import rows_of, sampled
from serve.runner.step_attention import StepAttention
from serve.runner.step_device import Event, StepDevice, Work
from serve.runner.step_inputs import block_bytes, fields, fill
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)

_SPREAD_STEPS = 16  # the growth of ranges is spread over so many steps
_PLENTY = 4  # ranges grow early only with so many free pages per sequence of the step
_NUM_SLOTS = 3  # CudaRunner.depth for steps in flight, one for the step that is prepared


@dataclass(slots=True)
class _Slot:
    """The pinned memory of one step. event completes after the last step that used it."""

    rows: Tensor
    attention: Tensor
    event: Event | None = None


@dataclass(slots=True)
class _Step:
    """A launched step. It may access `ranges`; prompt_rows are those whose results are returned."""

    sampled: list[Sequence]
    sampling: SamplingPlan
    ranges: list[Range]
    prompt_rows: list[PromptRowRequest]
    event: Event | None = None
    fetched: Fetched | None = None
    reader: PromptReader | None = None
    late: frozenset[Sequence] = NO_SEQUENCES
    num_drafted: int = 0

    def wait(self) -> StepResult:
        assert self.event is not None
        self.event.wait()
        prompts = () if self.reader is None else self.reader.parts()
        if not self.sampled:
            return StepResult([], [], None, prompts)
        assert self.fetched is not None
        tokens = sampled(self.sampling, self.fetched)
        result = StepResult(self.sampled, tokens.token_ids, tokens.logprobs, prompts)
        if self.num_drafted:
            result = result.agreed()
        return result.without(self.late) if self.late else result


class CudaRunner:
    """An OverlappingRunner. Only the compute thread calls it."""

    depth = 2
    tokens_on_device = True

    def __init__(
        self,
        model: Decoder,
        kv: KVMemory,
        attention: StepAttention,
        sampler: DeviceSampler,
        device: StepDevice,
        shapes: StepShapes,
        *,
        memory: Closable | None = None,
        selects: bool = False,
    ) -> None:
        """memory: what the runner closes. selects: whether decoded tokens select what they read."""
        self._model = model
        self._kv = kv
        self._pool = kv if isinstance(kv, KVManager) else None  # several pools grow no range early
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._shapes = shapes
        self._memory = memory
        self._selects = selects
        self._block = torch.zeros(
            block_bytes(shapes.max_rows), dtype=torch.uint8, device=device.device
        )
        self._sampled_hidden = torch.empty(
            shapes.max_sampled, model.spec.hidden_size, dtype=model.dtype, device=device.device
        )
        self.follower: Follower | None = None
        # what a head reads of the rows of the last step
        self._taken: Tensor | None = None
        if model.draft_head is not None:
            self._taken = torch.empty(
                shapes.max_rows,
                model.draft_head.taken_width,
                dtype=model.dtype,
                device=device.device,
            )
        self._slots = deque(
            _Slot(
                device.pinned(self._block.numel()),
                device.pinned(4 * attention.num_words).view(torch.int32),
            )
            for _ in range(_NUM_SLOTS)
        )
        self._graphs: dict[StepShape, Work] = {}
        self._launched: deque[_Step] = deque(maxlen=_NUM_SLOTS)
        self._num_steps = 0
        self._masks = MaskFiller(has_states=kv.state_interval is not None)

    # -- before the first step

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Computes steps of all shapes without a sequence, so that no kernel is compiled while a
        request waits, and captures the graphs of the shapes that gain from it."""
        for shape in self._shapes.eager:
            self._prepare_empty(shape)
            self._body(shape)
            self._warm_up_head(shape)
        can_capture = True
        for shape in self._shapes.captured:
            self._prepare_empty(shape)
            self._body(shape)
            self._warm_up_head(shape)
            can_capture = can_capture and self._capture(shape)
        empty_plan = self._sampler.plan([])
        self._sampler.warm_up_masks(self._model.logits(self._sampled_hidden[:1]))
        for count in self._shapes.sampled:
            for kind in Kind:
                self._sampler.upload(empty_plan)
                self._sampler.run(self._model.logits(self._sampled_hidden[:count]), kind)
                self._sampler.fetch(kind, count)
        self._device.wait()
        if self._graphs:
            logger.info("%d sizes of steps are captured in CUDA graphs", len(self._graphs))

    def _warm_up_head(self, shape: StepShape) -> None:
        """Computes rows of the head that drafts, if there is one, for the step that is uploaded."""
        head = self._model.draft_head
        if head is None or self._taken is None:
            return
        rows = torch.zeros(shape.rows, dtype=torch.int64, device=self._device.device)
        attention = self._attention.view(shape.rows, shape.decodes, shape.has_prompts)
        states = head.forward(rows, rows, head.read(self._taken[: shape.rows]), attention)
        head.logits(states[: self._shapes.max_sampled])

    def _capture(self, shape: StepShape) -> bool:
        """Captures a shape; returns whether it succeeded. A step without a graph is slower but
        correct."""
        try:
            self._graphs[shape] = self._device.capture(partial(self._body, shape))
        except Exception:  # if the device has failed, the next step raises again
            logger.warning("no more CUDA graphs: %s cannot be captured", shape, exc_info=True)
            return False
        return True

    def _prepare_empty(self, shape: StepShape) -> None:
        """Uploads the inputs of a step whose rows belong to no sequence."""
        slot = self._slots[0]
        slot.rows.zero_()
        no_rows = AttentionStep(0, [], [], [])
        self._attention.fill(
            slot.attention, no_rows, shape.rows, shape.decodes, is_captured=shape.is_captured
        )
        self._upload(slot, shape)
        self._device.wait()  # the caller writes the slot again at once

    # -- a step

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        """Launches one step and waits for it."""
        return self.launch(plan, launched).wait()

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Returns whether the plan has masks, which the host fills from the sequences' tokens."""
        return has_masks(plan)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, launched: abc.Callable[[], None]) -> _Step:
        targets = [s.kv_range for s in plan.sequences if s.kv_range is not None]
        self._kv.commit(targets)
        self._num_steps += 1
        has_prompts = plan.num_prompt_rows > 0
        if self._kv.maps_ahead and (has_prompts or self._num_steps % MAP_AHEAD_EVERY == 0):
            self._kv.map_ahead(upcoming_tokens(plan))
        shape = self._shapes.of(plan)
        slot = self._free_slot()
        fill(slot.rows, plan, shape.rows)
        chunks = self._attention.fill(
            slot.attention,
            _attention_step(plan, selects=self._selects),
            shape.rows,
            shape.decodes,
            is_captured=shape.is_captured,
        )
        sequences = plan.sampled_sequences()
        slots = [s.kv_range.index for s in sequences if s.kv_range is not None]
        rows = sampler_rows(sequences) if plan.num_drafted else sequences
        sampling = self._sampler.plan(rows_of(rows, slots))
        step = _Step(
            sequences, sampling, targets, prompt_row_requests(plan), num_drafted=plan.num_drafted
        )
        masks = self._masks.begin(plan)
        try:
            step.event = slot.event = self._submit(
                lambda: self._compute(plan, step, slot, shape, chunks, masks)
            )
        finally:
            step.late = masks.wait()
        self._launched.append(step)
        self._slots.rotate(-1)
        self._grow_early(plan)
        launched()
        return step

    def _submit(self, work: Work) -> Event:
        """Submits work. If it fails half way it has no event, so this waits for the device."""
        try:
            return self._device.submit(work)
        except BaseException:
            with contextlib.suppress(Exception):
                self._device.wait()
            raise

    def use_pages(self) -> bool:
        return True  # the accounting has mapped them itself

    def check(self) -> None:
        """Raises if the device is lost."""
        self._device.check()

    def _grow_early(self, plan: StepPlan) -> None:
        """Grows ranges some steps ahead while memory is plentiful. Sequences of one length need
        their next page in the same step, and mapping many pages takes longer than a step, so
        each range's index decides how far ahead it grows."""
        if self._pool is None or self._pool.num_unpromised < _PLENTY * len(plan.sequences):
            return
        num_left = 1 + plan.num_decodes // _SPREAD_STEPS * 2
        for sequence in plan.sequences[: plan.num_decodes]:
            target = sequence.kv_range
            assert target is not None
            end = sequence.num_computed_tokens + 2 + target.index % _SPREAD_STEPS
            if target.capacity < end <= sequence.max_tokens_total:
                num_computed = sequence.num_computed_tokens - sequence.rows_in_flight
                self._pool.grow(target, end, num_computed)
                num_left -= 1
            if not num_left:
                return

    def settle(self, first: int, end: int) -> None:
        """Waits until no step that was launched may touch these bytes of the reservation."""
        assert self._pool is not None, "a device's reservation has one pool of pages"
        for step in self._launched:
            spans = (span for target in step.ranges for span in self._pool.spans(target))
            if any(a < end and first < b for a, b in spans):
                wait_quietly(step.event)

    def _free_slot(self) -> _Slot:
        slot = self._slots[0]
        wait_quietly(slot.event)
        slot.event = None
        return slot

    @torch.inference_mode()
    def _compute(
        self,
        plan: StepPlan,
        step: _Step,
        slot: _Slot,
        shape: StepShape,
        chunks: abc.Sequence[PrefillChunk],
        masks: FillingMasks,
    ) -> None:
        """Launches the device's work in order. Masks are filled while the device runs the model."""
        self._upload(slot, shape)
        graph = self._graphs.get(shape)
        if step.prompt_rows:  # graphs share memory, so the next one overwrites the hidden states
            hidden = self._hidden(shape, chunks)
            step.reader = PromptReader(self._model, hidden, step.prompt_rows, self._fetch)
        elif graph is None:
            self._body(shape, chunks)
        else:
            graph()
        if self._taken is not None and self.follower is not None:
            self.follower.keep_taken(plan, self._taken)
        num_sampled = len(step.sampled)
        if not num_sampled:
            return
        masks.wait()
        self._sampler.upload(step.sampling)
        logits = self._model.logits(self._sampled_hidden[:num_sampled])
        self._sampler.run(logits, step.sampling.kind)
        step.fetched = self._sampler.fetch(step.sampling.kind, num_sampled)

    def _fetch(self, x: Tensor) -> Tensor:
        """Starts a copy to the host; torch keeps the pinned memory until the copy has ended."""
        if self._device.device.type == "cpu":
            return x
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return copy.copy_(x, non_blocking=True)

    def _upload(self, slot: _Slot, shape: StepShape) -> None:
        size = block_bytes(shape.rows)
        self._block[:size].copy_(slot.rows[:size], non_blocking=True)
        self._attention.upload(slot.attention)

    def _body(self, shape: StepShape, chunks: abc.Sequence[PrefillChunk] = ()) -> None:
        """Runs the model on the uploaded rows and keeps the hidden states of the sampled ones."""
        self._hidden(shape, chunks)

    def _hidden(self, shape: StepShape, chunks: abc.Sequence[PrefillChunk] = ()) -> Tensor:
        """Does what `_body` does, and returns the hidden states of all rows."""
        tokens, positions, slots, sampled = fields(self._block, shape.rows)
        attention = self._attention.view(shape.rows, shape.decodes, shape.has_prompts, chunks)
        ids = self._sampler.input_ids(tokens, slots)
        hidden = self._model.forward(ids, positions, attention)
        if self._taken is not None:
            assert self._model.draft_head is not None
            self._taken[: shape.rows].copy_(self._model.draft_head.take(hidden))
        count = min(shape.rows, self._shapes.max_sampled)
        torch.index_select(hidden, 0, sampled[:count], out=self._sampled_hidden[:count])
        return hidden

    def close(self) -> None:
        self._masks.close()
        try:
            self._device.wait()
        except Exception:
            logger.exception("the device cannot be waited for any more")
        self._graphs.clear()
        self._launched.clear()
        if self._model.weights.stream is not None:
            self._model.weights.stream.close()
        del self._model, self._attention  # views of the reservation must go before it
        if self._memory is not None:
            try:
                self._memory.close()
            except OSError as error:  # the device may be lost
                logger.error("giving device memory back failed: %s", error)


def wait_quietly(event: Event | None) -> None:
    """Waits for a step without raising its error, which `_Step.wait` raises."""
    if event is not None:
        with contextlib.suppress(Exception):
            event.wait()


def _attention_step(plan: StepPlan, *, selects: bool) -> AttentionStep:
    starts: abc.Sequence[int] = [s.kv_range.start for s in plan.sequences]  # type: ignore[union-attr]
    kv_lens = [
        s.num_computed_tokens + rows for s, rows in zip(plan.sequences, plan.num_rows, strict=True)
    ]
    selected = selected_by(plan) if selects else ()
    step = AttentionStep(plan.num_decodes, starts, plan.num_rows, kv_lens, *selected)
    return single_rows(step) if plan.num_drafted else step
