"""Runners of a group: tensor ranks compute one step at a time, a pipeline several.

Every rank applies a plan's edits of memory when it computes that plan (messages.py), the engine's
own rank included.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memory.edit_recorder import EditRecorder
from memory.kv_manager import KVManager
from memory.nodes.rank_links import places_of
from memory.segmented_kv import SegmentedKV
from serve.group.errors import StepLostError
from serve.group.group import Group, PostedStep
from serve.group.links.messages import NO_PLACES
from serve.group.rank import Rank
from serve.group.stats import timed
from serve.runner.batch import Batch, make_batch
from serve.runner.mask_filler import NO_SEQUENCES, MaskFiller
from serve.runner.prompt_reader import PromptReader, PromptRowRequest, prompt_row_requests
from serve.runner.runner import Closable, Follower, StepResult, sampled_result
from serve.scheduler.prompt_outputs import PromptPart
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)


class TensorRunner:
    """A Runner of one stage: all ranks compute a step together."""

    def __init__(
        self, group: Group, kv: KVManager | SegmentedKV, recorder: EditRecorder, resources: Closable
    ) -> None:
        """resources: closed after the group."""
        self._group = group
        self._kv = kv
        self._recorder = recorder
        self._resources = resources
        self._masks = MaskFiller()
        self._is_due = False  # edits wait for the end of a step
        self.follower: Follower | None = None
        self._model = group.own.model
        self._sample, self._fetch = _sampling(group.own)
        if group.grid.tensor > 1:
            group.own.lead_head(GroupHead(group))
        recorder.on_release = self._flush

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        try:
            return self._launch(plan, launched).wait()
        except StepLostError as error:
            # the fault may be an earlier step's, or one that has passed
            logger.warning("a step is computed again: %s", error)
            return self._launch(plan, launched).wait()

    def _launch(self, plan: StepPlan, launched: abc.Callable[[], None]) -> LaunchedStep:
        """Sends a step to the workers."""
        self._kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        batch = make_batch(plan)
        requests = prompt_row_requests(plan, None)
        launched()  # before the step has taken the recorded edits, which must reach all ranks
        places = NO_PLACES
        if isinstance(self._kv, SegmentedKV):
            places = places_of(batch.attention, self._kv.segment_tokens, self._kv.locate)
        posted = self._group.post_step(self._recorder, batch, places)
        return LaunchedStep(self, plan, batch, requests, posted)

    def finish(self, step: LaunchedStep) -> StepResult:
        """Computes the engine's part of the oldest step in flight, and samples."""
        try:
            self._group.begin(step.posted)
            masks = self._masks.begin(step.plan)
            try:
                with timed(self._group):
                    return self._computed(step, masks.wait)
            finally:
                masks.wait()  # a failed step is computed again, with its masks
        except Exception as error:
            other = self._group.failed(error)
            if other is None:
                raise
            raise other from error

    @torch.inference_mode()
    def _computed(
        self, step: LaunchedStep, late_masks: abc.Callable[[], frozenset[Sequence]]
    ) -> StepResult:
        hidden = self._group.compute(step.posted)
        prompts: abc.Sequence[PromptPart] = ()
        if step.requests:
            prompts = PromptReader(self._model, hidden, step.requests, self._fetch).parts()
        sampled, logits = step.batch.sampled, None
        if sampled:
            logits = self._model.logits(hidden[step.batch.sample_rows])
        self._group.own.settle()
        if logits is None:
            return StepResult([], [], None, prompts)
        num_drafted = step.plan.num_drafted
        return self._sample(logits, sampled, prompts, late_masks(), num_drafted=num_drafted)

    def _flush(self) -> None:
        """Sends the recorded edits, unless they have to come after those of a step in flight."""
        self._is_due = not self._group.is_quiet
        if not self._is_due:
            self._group.post_edits(self._recorder)

    def flush_due(self) -> None:
        """After a step, sends edits that have waited for its end, because no other step may follow:
        releases of memory, and transfers of pages, for which sequences may wait."""
        if self._is_due or self._recorder.has_transfers:
            self._flush()

    def close(self) -> None:
        with contextlib.closing(self._resources), contextlib.closing(self._group):
            self._masks.close()


class Sample(Protocol):
    """Samples the tokens of a step (serve/runner/runner.py: sampled_result)."""

    def __call__(
        self,
        logits: Tensor,
        sampled: list[Sequence],
        prompts: abc.Sequence[PromptPart],
        late: frozenset[Sequence],
        *,
        num_drafted: int,
    ) -> StepResult: ...


def _sampling(own: Rank) -> tuple[Sample, abc.Callable[[Tensor], Tensor]]:
    """Returns what samples where the engine's rank computes, and what brings its results to the
    host."""
    if own.device is None:
        return sampled_result, lambda x: x
    from serve.runner.device_step_sampler import DeviceStepSampler

    config, spec, device = own.source.config, own.source.spec, own.device
    return (
        DeviceStepSampler(
            spec.vocab_size, device.shapes.max_sampled, config.max_num_seqs, device.queue
        ),
        Tensor.cpu,
    )


class PipelineRunner(TensorRunner):
    """An OverlappingRunner of several stages, of which the engine's is the last.

    A step is in flight in each stage. The host computes its part, and samples, in `wait`.
    """

    tokens_on_device = False

    @property
    def depth(self) -> int:
        return self._group.grid.num_stages

    def launch(self, plan: StepPlan, launched: abc.Callable[[], None]) -> LaunchedStep:
        return self._launch(plan, launched)

    def check(self) -> None:
        """The host computes: it always can."""

    def needs_tokens(self, plan: StepPlan) -> bool:
        return False


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A PendingStep: what was saved of a step at its launch."""

    runner: TensorRunner
    plan: StepPlan
    batch: Batch
    requests: list[PromptRowRequest]
    posted: PostedStep
    late: frozenset[Sequence] = NO_SEQUENCES

    def wait(self) -> StepResult:
        try:
            return self.runner.finish(self)
        finally:
            self.runner.flush_due()


class GroupHead:
    """The head as the engine's model calls it: the other tensor ranks compute their columns."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @torch.inference_mode()
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None, "logits have none"
        return self._group.head(x)
