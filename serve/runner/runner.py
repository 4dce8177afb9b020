"""Computes one step on the device, from a plan to sampled tokens, and waits for it.

The runner owns the model, the K/V tensors and the attention seam. The plan decides which rows run,
and the KV manager which pages are mapped.
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from memory.attention.seam import PlannedAttention
from memory.evicting_kv import changes_with_rows
from memory.kv_memory import KVMemory
from memory.pages.kv_range import Range
from serve.models import StepModel, run_interleaved
from serve.prediction.hidden_reader import HiddenReader, HiddenSketch
from serve.request import TokenLogprobs
from serve.runner.batch import make_batch
from serve.runner.draft_rows import kept_rows, sampler_rows
from serve.runner.mask_filler import NO_SEQUENCES, MaskFiller
from serve.runner.prompt_reader import PromptReader, prompt_row_requests
from serve.runner.sampler import sample
from serve.scheduler.microbatches import LearnedMicrobatches, MicrobatchPolicy, split_in_two
from serve.scheduler.prompt_outputs import PromptPart
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

# While sequences decode, pages are mapped for the next _STEPS_AHEAD steps, every MAP_AHEAD_EVERY
# steps, because waking the mapping thread costs more than the mapping.
_STEPS_AHEAD = 12
MAP_AHEAD_EVERY = 6


class ForwardResult(NamedTuple):
    """The hidden states of a step.

    hidden: [T, hidden], all rows before the final norm, in any order. sampled has the sequences
    that get a token, in the plan's order, and sample_rows their last rows; None means all rows, in
    order. rows_at has each sequence's first row; None means the plan's order.
    """

    hidden: torch.Tensor
    sampled: list[Sequence]
    sample_rows: torch.Tensor | list[int] | None
    rows_at: list[int] | None


class StepResult(NamedTuple):
    """The result of a step. tokens[i] belongs to sampled[i], in the plan's order; a sequence is
    there once for each of its tokens. prompts has the results of prompt rows, and late the
    sequences that get no token because their mask was not ready. counts has the number of tokens of
    each sequence; None: one each. states has the sketches of hidden states that were due."""

    sampled: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    prompts: abc.Sequence[PromptPart] = ()
    late: frozenset[Sequence] = NO_SEQUENCES
    counts: list[int] | None = None
    states: abc.Sequence[HiddenSketch] = ()

    def without(self, removed: abc.Collection[Sequence]) -> StepResult:
        """Returns the result without the tokens of `removed`. Prompt results stay, because several
        outputs may share them."""
        kept = [i for i, sequence in enumerate(self.sampled) if sequence not in removed]
        counts, at = self.counts, 0
        if counts is not None:
            firsts = [at := at + n for n in [0, *counts[:-1]]]
            pairs = zip(counts, firsts, strict=True)
            counts = [n for n, first in pairs if self.sampled[first] not in removed]
        return self.of_rows(kept)._replace(counts=counts)

    def of_rows(self, rows: list[int]) -> StepResult:
        """Returns the result with these tokens only."""
        logprobs = self.logprobs
        return self._replace(
            sampled=[self.sampled[i] for i in rows],
            tokens=[self.tokens[i] for i in rows],
            logprobs=None if logprobs is None else [logprobs[i] for i in rows],
        )

    def agreed(self) -> StepResult:
        """Returns the result of a step with drafts, of whose rows all tokens are here, with the
        tokens that are kept."""
        kept = kept_rows(self.sampled, self.tokens)
        return self.of_rows(kept.rows)._replace(counts=kept.counts)

    def cut_to(self, counts: list[int]) -> StepResult:
        """Returns the result with the first counts[j] tokens of the j-th sequence."""
        assert self.counts is not None
        rows: list[int] = []
        first = 0
        for count, most in zip(counts, self.counts, strict=True):
            rows.extend(range(first, first + count))
            first += most
        return self.of_rows(rows)._replace(counts=counts)


def sampled_result(
    logits: torch.Tensor,
    sampled: list[Sequence],
    prompts: abc.Sequence[PromptPart],
    late: frozenset[Sequence],
    *,
    num_drafted: int = 0,
) -> StepResult:
    """Samples the tokens of a step; logits: [len(sampled), vocab]. Late sequences get none.
    num_drafted: the draft tokens in the step, whose sequences repeat in `sampled`."""
    if late:
        kept = [i for i, sequence in enumerate(sampled) if sequence not in late]
        if not kept:
            return StepResult([], [], None, prompts, late)
        sampled, logits = [sampled[i] for i in kept], logits[kept]
    rows = sampler_rows(sampled) if num_drafted else sampled
    result = StepResult(sampled, *sample(logits, rows), prompts, late)
    return result.agreed() if num_drafted else result


def upcoming_tokens(plan: StepPlan) -> list[tuple[Range, int]]:
    """Returns the ranges that need pages in the next steps, with their numbers of tokens: room for
    a prompt's next chunk, and for a few tokens of every sequence."""
    needs: list[tuple[Range, int]] = []
    for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
        target = sequence.kv_range
        assert target is not None
        end = sequence.num_computed_tokens + rows
        need = max(end + _STEPS_AHEAD, min(len(sequence.token_ids), end + rows)) - target.dropped
        if need > target.capacity:
            needs.append((target, min(need, sequence.max_tokens_total - target.dropped)))
    return needs


class Closable(Protocol):
    def close(self) -> None:
        """Frees the memory."""


@dataclass(slots=True)
class ClosedBehind:
    """Closes something after something else has ended."""

    end: abc.Callable[[], object]
    last: Closable

    def close(self) -> None:
        self.end()
        self.last.close()


class Runner(Protocol):
    """The device as the engine's loop sees it."""

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        """Computes the plan's rows and samples. If it raises, no row counts as computed.

        It calls launched() when the host's part is done and the device is about to compute.
        """

    def close(self) -> None:
        """Frees the device's memory."""


class PendingStep(Protocol):
    """A launched step. late: the sequences that get no token, as in its result."""

    late: frozenset[Sequence]

    def wait(self) -> StepResult:
        """Blocks until the tokens are on the host, without holding the interpreter's lock. It
        raises what the step raised; then no row counts as computed. Sequences have changed since
        the launch, so it uses only what was saved then and the identity of `sampled`.

        Where tokens are not on the device, token_ids are during the call as they were at the
        launch, and the result may have further late sequences, whose masks were not ready when the
        step was sampled."""


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that queues a step on the device while earlier ones are computed.

    At most `depth` steps are in flight, and they complete in order. `run` must be called only when
    none is. Two kinds differ in where a sampled token is known first:

    - A device with its own queue samples and keeps the tokens (tokens_on_device), so a sequence
      may have rows in every step in flight.
    - A pipeline of `depth` stages samples on the host, in the last stage: a sequence is not
      planned while its token is pending. Chunks of one prompt follow each other without a wait.
      Every stage, the host's own included, applies a plan's edits of memory (maps, unmaps,
      copies) when it computes that plan and not before, because steps that it computes later
      still use the pages and addresses that the edits give away.
    """

    @property
    def depth(self) -> int:
        """The most steps in flight: 2 for a device's queue, the number of stages of a pipeline."""

    @property
    def tokens_on_device(self) -> bool:
        """Whether the device puts a pending token into the next step itself."""

    def launch(self, plan: StepPlan, launched: abc.Callable[[], None]) -> PendingStep:
        """Commits the plan's pages and queues its rows and sampling behind the previous step.

        A PENDING_TOKEN in token_ids is the token that the previous step samples for the sequence;
        the device takes it from there. num_computed_tokens and len(token_ids) count it. Where
        tokens are not on the device, there is none. If the call raises, no row counts as computed.

        It calls launched() when the host's part is done. Pages are mapped while the previous step
        runs, at addresses that it does not touch; a memory back end that must unmap waits for the
        device itself. A page may go to another sequence while a step that uses it is in flight,
        because all writes to pages happen in the order of the steps.
        """

    def check(self) -> None:
        """Raises, after a failed step, if the device cannot compute any more."""

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Returns whether the plan needs all its tokens on the host before it can be launched."""


class Follower(Protocol):
    """Reads the hidden states of all rows."""

    def keep(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Takes the result of a step, [T, hidden], before it is sampled."""

    def keep_taken(self, plan: StepPlan, states: Tensor) -> None:
        """Takes what a draft head reads of a step's rows, [at least T, any], in a device's memory,
        which the next step overwrites."""


@runtime_checkable
class FollowedRunner(Protocol):
    """A runner that gives what a head reads, as soon as that is set."""

    follower: Follower | None

    def use_pages(self) -> bool:
        """Makes pages usable that the accounting has given since the last step; returns whether
        they are."""


class ModelRunner:
    """Runs a model on this machine, one step at a time."""

    def __init__(
        self,
        model: StepModel,
        kv: KVMemory,
        attention: PlannedAttention,
        *,
        memory: Closable | None = None,
        microbatches: MicrobatchPolicy | None = None,
        states: HiddenReader | None = None,
        follower: Follower | None = None,
        selects: bool = False,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        """microbatches: decides when a step is computed as two micro-batches that alternate. By
        default this is learned when attention is remote, and never done when it is local. states:
        reads the hidden states that lengths are predicted from. follower: reads those of all rows,
        where attention is local. selects: whether decoded tokens select what they read."""
        self._model = model
        self._selects = selects
        self._kv = kv
        self._attention = attention
        self._memory = memory
        self._clock = clock
        if microbatches is None and attention.is_remote:
            microbatches = LearnedMicrobatches()
        self._microbatches = microbatches
        self._states = states
        self._follower = follower
        self._num_steps = 0
        self._masks = MaskFiller(has_states=changes_with_rows(kv))

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
            if self._follower is not None:
                assert rows_at is None, "the rows are in the plan's order"
                self._follower.keep(plan, hidden)
            requests = prompt_row_requests(plan, rows_at)
            prompts = PromptReader(self._model, hidden, requests).parts() if requests else ()
            if not sampled:
                return StepResult([], [], None, prompts)
            if sample_rows is not None:
                hidden = hidden[sample_rows]
            logits = self._model.logits(hidden)
            states = () if self._states is None else self._read_states(hidden, sampled)
        finally:
            late = masks.wait()  # a failed step is computed again, with its masks
        result = sampled_result(logits, sampled, prompts, late, num_drafted=plan.num_drafted)
        return result._replace(states=states) if states else result

    def _read_states(
        self, hidden: torch.Tensor, sampled: list[Sequence]
    ) -> abc.Sequence[HiddenSketch]:
        """Reads the hidden states that are due; those of drafts may belong to other texts."""
        assert self._states is not None
        firsts = [i for i, s in enumerate(sampled) if not i or sampled[i - 1] is not s]
        if len(firsts) == len(sampled):
            return self._states.read(hidden, sampled)
        return self._states.read(hidden[firsts], [sampled[i] for i in firsts])

    def _timed(
        self, microbatches: MicrobatchPolicy, plan: StepPlan, launched: abc.Callable[[], None]
    ) -> ForwardResult:
        """Computes the step in the mode that the policy chooses, and reports its time."""
        work = plan.num_decodes, plan.num_prompt_rows
        is_split = microbatches.splits(*work)
        started_s = self._clock()
        result = (self._microbatched if is_split else self._whole)(plan, launched)
        microbatches.learn(*work, is_split, self._clock() - started_s)
        return result

    def _whole(self, plan: StepPlan, launched: abc.Callable[[], None]) -> ForwardResult:
        batch = make_batch(plan, selects=self._selects)
        attention = self._attention.plan(batch.attention)
        launched()
        hidden = self._model.forward(batch.input_ids, batch.positions, attention)
        samples_all = len(batch.sampled) == hidden.shape[0]
        return ForwardResult(
            hidden, batch.sampled, None if samples_all else batch.sample_rows, None
        )

    def _microbatched(self, plan: StepPlan, launched: abc.Callable[[], None]) -> ForwardResult:
        """Computes the same rows, with the same bits, as two micro-batches that alternate."""
        halves = split_in_two(plan)
        assert halves is not None
        batches = [make_batch(plan.subset(half), selects=self._selects) for half in halves]
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
        sample_rows: list[int] = []
        for index in [index for index, samples in enumerate(plan.samples) if samples]:
            end = rows_at[index] + plan.num_rows[index]
            sample_rows.extend(range(end - plan.num_sampled(index), end))
        return ForwardResult(hidden, plan.sampled_sequences(), sample_rows, rows_at)

    def close(self) -> None:
        self._masks.close()
        del self._model, self._attention  # views of the reservation must go before it
        if self._memory is not None:
            self._memory.close()
