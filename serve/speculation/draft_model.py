"""Computes drafts with a small model, whose K/V is in memory of its own.

For each sequence that has drafts there is a range of this memory. The model computes the prompt in
chunks, and then, a token at a time and all sequences together, what follows. Draft tokens that the
target accepts are computed already; behind those that it rejects, the next draft overwrites the
K/V. A sequence for which there is no room, or that is too long, has no drafts.
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, field

import torch

from memory.attention.seam import AttentionStep
from memory.pages.kv_range import Range
from memory.prefix.index import PrefixHasher
from ops.cpu.sampling import SamplingInputs
from serve.loading.runtime import Runtime
from serve.runner.forward import Forward
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.scheduler.step_time import StepTimeModel
from serve.speculation.drafted_rows import draft_in_steps, drafting_inputs, draw, work_of

# A range is opened with so many tokens' room beyond those that the sequence has.
_ROOM = 16


@dataclass(slots=True)
class _Text:
    """What the draft model has of one sequence. num_known: the sequence's tokens at the last draft,
    behind which `drafted` was computed. num_computed: tokens whose K/V is written, with those."""

    target: Range
    inputs: SamplingInputs
    num_checked: int = 0  # tokens that are known to be in the vocabulary
    num_computed: int = 0
    num_known: int = 0
    drafted: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)

    def settle(self, token_ids: list[int]) -> None:
        """Keeps of the K/V what belongs to the sequence's tokens, all but the last one at most."""
        agreed = self.num_known
        for token in self.drafted[: self.num_computed - self.num_known]:
            if agreed >= len(token_ids) or token_ids[agreed] != token:
                break
            agreed += 1
        if self.drafted:
            self.num_computed, self.drafted = agreed, []
        self.num_computed = min(self.num_computed, len(token_ids) - 1)
        self.inputs.forget_after(len(token_ids))


@dataclass(slots=True)
class _Part:
    """A DraftPart. missing: the tokens that are computed before the first one of the draft."""

    sequence: Sequence
    text: _Text
    missing: list[int]
    draft: list[int]
    depth: int = 0

    @property
    def tokens(self) -> list[int]:
        """The tokens of the next step."""
        return self.draft[-1:] or self.missing

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_computed(self) -> int:
        return self.text.num_computed

    @property
    def inputs(self) -> SamplingInputs:
        return self.text.inputs


class DraftModel:
    """A small model and its K/V. Only the compute thread calls it. time: predicts its steps, which
    clock times."""

    def __init__(
        self,
        runtime: Runtime,
        compute: Forward,
        vocab_size: int,
        rows_per_step: int,
        *,
        has_prefixes: bool,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        """compute: computes the model's steps. vocab_size: the target's. rows_per_step: the most
        of a step. has_prefixes: K/V of common prefixes is shared and kept."""
        self.time = StepTimeModel(rows_per_step)
        self.clock = clock
        self._compute, self._kv = compute, runtime.kv
        self._memory = runtime.memory
        self._own_vocab = runtime.spec.vocab_size
        self._vocab_size = vocab_size
        self._hasher = PrefixHasher(self._kv.page_end) if has_prefixes else None
        self._texts: dict[Sequence, _Text] = {}
        self._refused: set[Sequence] = set()

    @property
    def num_pages_in_use(self) -> int:
        return self._kv.num_in_use

    def most_drafted(self, sequence: Sequence) -> int:
        """Returns how many tokens can be drafted for a sequence; 0 if it can have none."""
        if sequence in self._refused:
            return 0
        return max(0, self._kv.max_model_len - len(sequence.token_ids))

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many of a sequence's tokens are still to be computed."""
        text = self._texts.get(sequence)
        if text is None:
            return len(sequence.token_ids)
        text.settle(sequence.token_ids)
        return len(sequence.token_ids) - text.num_computed

    @torch.inference_mode()
    def catch_up(self, chunks: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Computes tokens that sequences have: of each as many as its chunk says, but not the last
        one."""
        parts: list[_Part] = []
        for sequence, rows in chunks:
            text, tokens = self._text_of(sequence), sequence.token_ids
            if text is None:
                continue
            first = text.num_computed
            end = min(first + rows, len(tokens) - 1)
            if end > first and self._grow(sequence, text, len(tokens)):
                parts.append(_Part(sequence, text, tokens[first:end], []))
        if not parts:
            return
        work, began_s = work_of(parts), self.clock()
        self._forward(parts, draws=False)
        self.time.learn(work, self.clock() - began_s)
        for part in parts:
            self._insert_prefix(part.sequence, part.text)

    @torch.inference_mode()
    def draft(
        self, sequences: abc.Sequence[Sequence], depths: abc.Sequence[int]
    ) -> list[list[int]]:
        """Returns what may follow each sequence, at most depths[i] > 0 tokens."""
        drafts: list[list[int]] = [[] for _ in sequences]
        parts: list[_Part] = []
        left = self.time.rows_per_step
        for sequence, depth, draft in zip(sequences, depths, drafts, strict=True):
            text, tokens = self._text_of(sequence), sequence.token_ids
            if text is None or len(tokens) - text.num_computed > left:
                continue
            if self._grow(sequence, text, len(tokens) + depth - 1):
                text.num_known, text.drafted = len(tokens), draft
                parts.append(_Part(sequence, text, tokens[text.num_computed :], draft, depth))
                left -= parts[-1].num_rows
        if not parts:
            return drafts
        draft_in_steps(parts, self._extend, self._vocab_size, self.time, self.clock)
        return drafts

    def _extend(self, parts: list[_Part]) -> None:
        """Computes the parts' tokens, and gives each draft the token that follows."""
        logits = self._forward(parts, draws=True)
        assert logits is not None, "each part is drawn"
        for part, token in zip(parts, draw(logits, parts), strict=True):
            part.draft.append(token)

    def _forward(self, parts: list[_Part], *, draws: bool) -> torch.Tensor | None:
        """Computes the parts' tokens. Returns the logits, [len(parts), vocab], of the last row of
        each part, if a token is drawn from them."""
        order = sorted(range(len(parts)), key=lambda i: len(parts[i].tokens) > 1)
        input_ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = [0] * len(parts)
        for i in order:
            text, tokens = parts[i].text, parts[i].tokens
            first = text.num_computed
            text.num_computed += len(tokens)
            input_ids += tokens
            positions += range(first, text.num_computed)
            ends[i] = len(input_ids) - 1
        texts, num_rows = [parts[i].text for i in order], [len(parts[i].tokens) for i in order]
        self._kv.commit([text.target for text in texts])
        step = AttentionStep(
            num_rows.count(1),
            [text.target.start for text in texts],
            num_rows,
            [text.num_computed for text in texts],
        )
        return self._compute(input_ids, positions, step, ends if draws else [])

    def _text_of(self, sequence: Sequence) -> _Text | None:
        """Returns what there is of a sequence, or begins with it if there is room; None if it
        cannot have drafts."""
        text, tokens = self._texts.get(sequence), sequence.token_ids
        if text is None:
            text = self._open(sequence)
            if text is None:
                return None
        if self._own_vocab < self._vocab_size and not self._knows(tokens[text.num_checked :]):
            self._refuse(sequence)
            return None
        text.num_checked = len(tokens)
        return text

    def _knows(self, token_ids: list[int]) -> bool:
        return not token_ids or max(token_ids) < self._own_vocab

    def _open(self, sequence: Sequence) -> _Text | None:
        size = min(len(sequence.token_ids) + _ROOM, self._kv.max_model_len)
        hit = None
        keys: list[bytes] = []
        if self._hasher is not None:
            self._hasher.extend(keys, sequence.token_ids, sequence.request.params.cache_salt)
            hit = self._kv.match(keys, len(sequence.token_ids) - 1)
        if not self._kv.can_fit(size, hit=hit):
            self._close_preempted()
            hit = None if hit is None else self._kv.match(keys, len(sequence.token_ids) - 1)
            if not self._kv.can_fit(size, hit=hit):
                return None
        text = _Text(self._kv.open(size, hit), drafting_inputs(sequence, self._own_vocab))
        text.page_keys = keys
        text.num_computed = 0 if hit is None else hit.num_tokens
        self._texts[sequence] = text
        return text

    def _close_preempted(self) -> None:
        """Frees the memory of sequences that wait."""
        for sequence in list(self._texts):
            if sequence.status is not SequenceStatus.RUNNING:
                self._close(sequence)

    def _grow(self, sequence: Sequence, text: _Text, num_tokens: int) -> bool:
        """Gives a sequence room for num_tokens; if there is none, it has no drafts any more."""
        num_tokens = min(num_tokens, self._kv.max_model_len)
        if self._kv.grow(text.target, num_tokens, text.num_computed):
            return True
        self._refuse(sequence)
        return False

    def _refuse(self, sequence: Sequence) -> None:
        self._refused.add(sequence)
        self._close(sequence)

    def _insert_prefix(self, sequence: Sequence, text: _Text) -> None:
        """Offers the K/V of the sequence's own tokens to later sequences."""
        if self._hasher is not None:
            salt, num_computed = sequence.request.params.cache_salt, text.num_computed
            self._hasher.extend(text.page_keys, sequence.token_ids, salt, num_computed)
            self._kv.insert_prefix(text.target, text.page_keys, num_computed)

    def ended(self, sequence: Sequence) -> None:
        """Frees what a sequence has."""
        self._refused.discard(sequence)
        text = self._texts.get(sequence)
        if text is not None:
            text.settle(sequence.token_ids)
            self._insert_prefix(sequence, text)
            self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._kv.close(text.target)

    def follow(self) -> float:
        """Does nothing: prompts are computed when drafts are worth it. Returns the seconds."""
        return 0.0

    def trim(self) -> None:
        self._kv.trim()

    def close(self) -> None:
        self._kv.close_all()
        self._memory.close()
