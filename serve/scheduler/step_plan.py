"""The plan of one step, and the limits that the scheduler keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from serve.config import EngineConfig
from serve.scheduler.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepPlan:
    """The rows of one step.

    sequences: in row order, those that decode first. num_rows[i]: the rows of sequences[i].
    num_decodes: the number of sequences that decode: each has a row, and one more for each of its
    draft_ids, of which there are num_drafted in all. samples[i]: whether a token is sampled from
    the last row of sequences[i], or from all of them if it decodes: the step computes its last
    known token, and it is not a prompt without an answer. contexts[i]: the computed tokens before
    the step; None until its launch. draft_s: the seconds that another model took for the drafts.
    """

    sequences: list[Sequence]
    num_rows: list[int]
    num_decodes: int
    samples: list[bool]
    num_total_rows: int
    contexts: list[int] | None = None
    num_drafted: int = 0
    draft_s: float = 0.0

    @property
    def num_prompt_rows(self) -> int:
        return self.num_total_rows - self.num_decodes - self.num_drafted

    def num_sampled(self, index: int) -> int:
        """Returns how many of the last rows of sequences[index] are sampled, if any is: all of one
        that decodes."""
        return self.num_rows[index] if index < self.num_decodes else 1

    def sampled_sequences(self) -> list[Sequence]:
        """Returns the sequences that are sampled, once for each of their sampled rows."""
        pairs = zip(self.sequences, self.samples, strict=True)
        if not self.num_drafted:
            return [s for s, samples in pairs if samples]
        return [
            s for i, (s, samples) in enumerate(pairs) if samples for _ in range(self.num_sampled(i))
        ]

    def num_known(self, index: int) -> int:
        """Returns the tokens of sequences[index] that a launched plan has computed, without those
        of its draft."""
        assert self.contexts is not None
        return self.contexts[index] + (1 if index < self.num_decodes else self.num_rows[index])

    def subset(self, indices: Iterable[int]) -> StepPlan:
        """Returns a plan of sequences[i] for each i of `indices`, which rise."""
        indices = list(indices)
        num_rows = [self.num_rows[i] for i in indices]
        num_decodes = sum(i < self.num_decodes for i in indices)
        return StepPlan(
            sequences=[self.sequences[i] for i in indices],
            num_rows=num_rows,
            num_decodes=num_decodes,
            samples=[self.samples[i] for i in indices],
            num_total_rows=sum(num_rows),
            contexts=None if self.contexts is None else [self.contexts[i] for i in indices],
            num_drafted=sum(num_rows[:num_decodes]) - num_decodes,
        )

    def without_late(self, late: Collection[Sequence]) -> StepPlan:
        """Returns what counts of the plan when the masks of `late` were not ready in time.

        Their decode rows are dropped. A prompt loses its last row only, which would have been
        sampled; its other rows are computed.
        """
        part = self.subset(
            i
            for i, sequence in enumerate(self.sequences)
            if i >= self.num_decodes or sequence not in late
        )
        for i in range(part.num_decodes, len(part.sequences)):
            if part.sequences[i] in late:
                part.num_rows[i] -= 1
                part.samples[i] = False
                part.num_total_rows -= 1
        return part

    def unfinished(self) -> list[int]:
        """Returns the indices of the sequences that have not finished."""
        finished = SequenceStatus.FINISHED
        return [i for i, sequence in enumerate(self.sequences) if sequence.status is not finished]

    def still_running(self) -> StepPlan | None:
        """Returns the plan of the sequences that run: this very plan if all do, None if none does.

        Sequences may have finished or been preempted since the plan was made.
        """
        running = SequenceStatus.RUNNING
        indices = [i for i, sequence in enumerate(self.sequences) if sequence.status is running]
        if len(indices) == len(self.sequences):
            return self
        return self.subset(indices) if indices else None


def make_plan(
    decodes: list[Sequence], chunks: list[tuple[Sequence, int]], num_certain: int = 0
) -> StepPlan | None:
    """Returns the plan of the sequences that still run, or None if there is none.

    decodes: sequences with one row; chunks: sequences with their numbers of rows. num_certain:
    the first so many of `decodes` are known to run and to be sampled.
    """
    # A sequence that was planned early may have been preempted for one planned later.
    running = SequenceStatus.RUNNING
    sequences = decodes
    if num_certain < len(decodes):
        sequences = decodes[:num_certain]
        sequences += [s for s in decodes[num_certain:] if s.status is running]
    num_decodes = len(sequences)
    num_rows = [1] * num_decodes
    for sequence, rows in chunks:
        if sequence.status is running:
            sequences.append(sequence)
            num_rows.append(rows)
    if not sequences:
        return None
    num_certain = min(num_certain, num_decodes)
    samples = [True] * num_certain
    for index in range(num_certain, len(sequences)):
        sequence = sequences[index]
        num_known = sequence.num_computed_tokens + num_rows[index]
        num_tokens = len(sequence.token_ids)
        samples.append(num_known == num_tokens < sequence.max_tokens_total)
    num_prompt_rows = sum(num_rows[num_decodes:])
    return StepPlan(sequences, num_rows, num_decodes, samples, num_decodes + num_prompt_rows)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """At most max_num_seqs sequences run at once. A step has at most max_num_batched_tokens rows,
    and at most max_chunk_tokens of one sequence. A step with decode rows has only as many prompt
    rows as keep its predicted time within inter_token_slo_s or, if that is None, within
    inter_token_factor times the predicted time of its decode rows alone."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    inter_token_slo_s: float | None = None
    inter_token_factor: float = math.inf

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulerLimits:
        """Returns the limits that an engine's settings ask for."""
        return cls(
            config.max_num_seqs,
            config.batched_tokens,
            config.chunk_tokens,
            config.inter_token_slo_s,
            config.inter_token_factor,
        )
