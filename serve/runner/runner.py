"""Pool 2's work: one step on the device, from a plan to sampled tokens. Synchronous.

Owns the model, the K/V tensors and the attention seam. It decides nothing: the plan says which
rows run, the KV manager which pages are mapped.
"""

from __future__ import annotations

import collections.abc as abc
import time
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from memory.attention.seam import PlannedAttention
from memory.kv_memory import KVMemory
from memory.pages.kv_range import Range
from serve.models import Decoder, run_interleaved
from serve.request import TokenLogprobs
from serve.runner.batch import make_batch
from serve.runner.mask_filler import NO_SEQUENCES, MaskFiller
from serve.runner.prompt_reader import PromptReader, prompt_row_requests
from serve.runner.sampler import sample
from serve.scheduler.microbatches import LearnedMicrobatches, MicrobatchPolicy, split_in_two
from serve.scheduler.prompt_outputs import PromptPart
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

# Decoding, pages are mapped ahead for so many steps, and so often: waking the thread costs more
# than what it does.
_STEPS_AHEAD = 12
MAP_AHEAD_EVERY = 6


class ForwardResult(NamedTuple):
    """hidden: [T, hidden], all rows before the final norm, in whatever order. sampled: those that
    get a token, in the plan's order; sample_rows: their last rows; None: all, as they are.
    rows_at: each sequence's first row; None: in the plan's order."""

    hidden: torch.Tensor
    sampled: list[Sequence]
    sample_rows: torch.Tensor | list[int] | None
    rows_at: list[int] | None


class StepResult(NamedTuple):
    """tokens[i] for sampled[i], in the plan's order. prompts: what was asked of prompts' rows.
    late: of the plan's, those that get no token because their mask is not made yet."""

    sampled: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    prompts: abc.Sequence[PromptPart] = ()
    late: frozenset[Sequence] = NO_SEQUENCES

    def without(self, others: abc.Collection[Sequence]) -> StepResult:
        """Of prompts all is left: several outputs may have a part in them."""
        kept = [i for i, sequence in enumerate(self.sampled) if sequence not in others]
        logprobs = self.logprobs
        return self._replace(
            sampled=[self.sampled[i] for i in kept],
            tokens=[self.tokens[i] for i in kept],
            logprobs=None if logprobs is None else [logprobs[i] for i in kept],
        )


def upcoming_tokens(plan: StepPlan) -> list[tuple[Range, int]]:
    """Tokens that the plan's sequences will need places for in the next steps: a prompt its next
    chunk, everyone a few more."""
    needs: list[tuple[Range, int]] = []
    for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
        target = sequence.kv_range
        assert target is not None
        end = sequence.num_computed_tokens + rows
        need = max(end + _STEPS_AHEAD, min(len(sequence.token_ids), end + rows))
        if need > target.capacity:
            needs.append((target, min(need, sequence.max_tokens_total)))
    return needs


class Closable(Protocol):
    def close(self) -> None:
        """Give memory back."""


class Runner(Protocol):
    """What the engine's loop needs of the device."""

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        """Compute the plan's rows and sample. May raise; then nothing of the plan counts.

        Calls launched() when the host's part is done and the device is about to work.
        """

    def close(self) -> None:
        """Give the device's memory back."""


class PendingStep(Protocol):
    """A step that has been launched. late: those that get no token, as in its result."""

    late: frozenset[Sequence]

    def wait(self) -> StepResult:
        """Block until its tokens are on the host, without the interpreter's lock. Raises what the
        step raised; then nothing of it counts. Sequences have moved on since the launch: what is
        needed of them is kept from there, but for the identity of those in `sampled`."""


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner whose steps follow each other on the device while the host makes the next one.

    At most two steps are in flight. `run` is for moments when none is.
    """

    def launch(self, plan: StepPlan, launched: abc.Callable[[], None]) -> PendingStep:
        """Commit the plan's pages and queue its rows and the sampling behind the step before.

        Where token_ids has PENDING_TOKEN, the token is the one that the step before samples for
        the sequence: the device takes it from there. num_computed_tokens and len(token_ids) are
        as if it were known. May raise; then nothing of the plan counts.

        Calls launched() when the host's part is done. Pages are mapped while the step before
        runs, in places that it does not touch; a memory back end that has to unmap waits for
        the device itself. A page may be given to another sequence while a step that uses it is
        in flight: whatever writes to pages does so in the order of the steps.
        """

    def check(self) -> None:
        """After a step that failed: raises if no other one can be computed any more."""

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether the plan can only be launched when all its tokens are known on the host."""


class ModelRunner:
    """A model on this machine."""

    def __init__(
        self,
        model: Decoder,
        kv: KVMemory,
        attention: PlannedAttention,
        *,
        memory: Closable | None = None,
        microbatches: MicrobatchPolicy | None = None,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        """microbatches: decides when a step is computed as two micro-batches that alternate. By
        default this is learned when attention is remote, and never done when it is local."""
        self._model = model
        self._kv = kv
        self._attention = attention
        self._memory = memory
        self._clock = clock
        if microbatches is None and attention.is_remote:
            microbatches = LearnedMicrobatches()
        self._microbatches = microbatches
        self._num_steps = 0
        self._masks = MaskFiller()

    @torch.inference_mode()
    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        self._kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        self._num_steps += 1
        has_prompts = len(plan.num_rows) > plan.num_decodes
        if self._kv.maps_ahead and (has_prompts or self._num_steps % MAP_AHEAD_EVERY == 0):
            self._kv.map_ahead(upcoming_tokens(plan))
        masks = self._masks.begin(plan)
        try:
            if self._microbatches is None or len(plan.sequences) < 2:
                computed = self._whole(plan, launched)
            else:
                computed = self._timed(self._microbatches, plan, launched)
            hidden, sampled, sample_rows, rows_at = computed
            wanted = prompt_row_requests(plan, rows_at)
            prompts = PromptReader(self._model, hidden, wanted).parts() if wanted else ()
            if not sampled:
                return StepResult([], [], None, prompts)
            logits = self._model.logits(hidden if sample_rows is None else hidden[sample_rows])
        finally:
            late = masks.wait()  # a step that fails is computed again, and its masks with it
        if late:
            kept = [i for i, sequence in enumerate(sampled) if sequence not in late]
            if not kept:
                return StepResult([], [], None, prompts, late)
            sampled, logits = [sampled[i] for i in kept], logits[kept]
        result = sample(logits, sampled)
        return StepResult(sampled, result.token_ids, result.logprobs, prompts, late)

    def _timed(
        self, microbatches: MicrobatchPolicy, plan: StepPlan, launched: abc.Callable[[], None]
    ) -> ForwardResult:
        """One way or the other, and how long it took."""
        work = plan.num_decodes, plan.num_total_rows - plan.num_decodes
        is_split = microbatches.splits(*work)
        began_s = self._clock()
        found = (self._microbatched if is_split else self._whole)(plan, launched)
        microbatches.learn(*work, is_split, self._clock() - began_s)
        return found

    def _whole(self, plan: StepPlan, launched: abc.Callable[[], None]) -> ForwardResult:
        batch = make_batch(plan)
        attention = self._attention.plan(batch.attention)
        launched()
        hidden = self._model.forward(batch.input_ids, batch.positions, attention)
        is_all = len(batch.sampled) == hidden.shape[0]
        return ForwardResult(hidden, batch.sampled, None if is_all else batch.sample_rows, None)

    def _microbatched(self, plan: StepPlan, launched: abc.Callable[[], None]) -> ForwardResult:
        """The same rows with the same bits, in two batches that take turns."""
        halves = split_in_two(plan)
        assert halves is not None
        batches = [make_batch(plan.subset(half)) for half in halves]
        passes = [
            self._model.slices(
                batch.input_ids, batch.positions, self._attention.plan(batch.attention)
            )
            for batch in batches
        ]
        launched()
        hidden = torch.cat(run_interleaved(passes))
        rows_at = [0] * len(plan.sequences)
        row = 0
        for index in (index for half in halves for index in half):
            rows_at[index] = row
            row += plan.num_rows[index]
        chosen = [index for index, samples in enumerate(plan.samples) if samples]
        last_rows = [rows_at[index] + plan.num_rows[index] - 1 for index in chosen]
        return ForwardResult(hidden, [plan.sequences[p] for p in chosen], last_rows, rows_at)

    def close(self) -> None:
        self._masks.close()
        del self._model, self._attention  # views of the reservation go before it does
        if self._memory is not None:
            self._memory.close()
