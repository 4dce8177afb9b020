"""Attention of sequences that drop K/V: keeps the scores of their keys, and moves what stays.

A sequence's K/V length is its tokens without those that all layers have dropped; where layers keep
different numbers, its places are those of the layer that keeps the most, and the others are
attended to with shorter lengths. Keys stay rotated by the positions they had. Layers that keep less
may be in layer groups of their own (layer_groups.py), whose pages behind their lengths are free.

It wraps a local implementation of the seam. A step without rows that give scores, and without
sequences whose layers differ, is planned by that one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from memory.attention.grouped import GroupedAttention, GroupedPlan
from memory.attention.seam import (
    Attention,
    AttentionLayer,
    AttentionStep,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
)
from memory.attention.token_stores import Floats, Kept, KeyScorer, ScoredRows, TokenStore
from memory.policies.drop_schedule import NEVER, DropSchedule, layer_budgets
from memory.policies.eviction import EvictionPolicy, gumbel_noise, policy_of, temperature
from memory.policies.setting import KVPolicy

_TILE = 16
_NOISE_AHEAD = 64  # keys whose noise is drawn before they are there


@dataclass(slots=True)
class _Scored:
    """A running sequence. dropped: tokens that no layer has any more. shorter: how many fewer than
    the most each layer has; empty: none. sums, noise: [layers, Hk, places], from the first row that
    gives scores on. filled: the places that have noise."""

    schedule: DropSchedule
    policy: EvictionPolicy
    first_scored: int
    last_scored: int
    seed: int
    num_answer: int
    dropped: int = 0
    shorter: list[int] = field(default_factory=list)
    sums: Floats | None = None
    noise: Floats | None = None
    filled: int = 0


class EvictingAttention:
    """Implements PlannedAttention. Each sequence drops tokens by its own policy."""

    is_remote = False

    def __init__(
        self,
        inner: PlannedAttention,
        layers: Sequence[AttentionLayer],
        store: TokenStore,
        setting: KVPolicy,
    ) -> None:
        """inner: local attention over K/V that `store` gives access to; that of groups of
        neighbouring layers, or of all. setting: the policy of sequences that have no other one."""
        heads = {layer.num_kv_heads for layer in layers}
        assert len(heads) == 1, "layers with equal numbers of K/V heads"
        self._inner = inner
        self._num_layers, self._num_heads = len(layers), heads.pop()
        self._groups: list[PlannedAttention] = [inner]
        self.layers_of: Sequence[Sequence[int]] = [range(len(layers))]
        if isinstance(inner, GroupedAttention):
            self._groups, self.layers_of = inner.groups, inner.layers_of
        self.store = store
        self.setting = setting
        self._sequences: dict[int, _Scored] = {}

    # ---- sequences, by the starts of their ranges

    def schedule(self, num_prompt: int, setting: KVPolicy | None = None) -> DropSchedule:
        """Returns when a sequence drops tokens. setting: its own policy; None: the engine's."""
        firsts = [numbers[0] for numbers in self.layers_of]
        return DropSchedule(setting or self.setting, num_prompt, self._num_layers, firsts)

    def first_scored(self, schedule: DropSchedule, num_answer: int) -> int:
        """Returns the first position of a sequence whose row gives scores, so that it has to be
        computed; NEVER if no token is dropped, or no scores are needed."""
        num_prompt, policy = schedule.num_prompt, policy_of(schedule.policy)
        last_dropped = num_prompt + num_answer - 2  # the last token is never computed
        if not policy.has_scores or schedule.next_drop(0, 0) > last_dropped:
            return NEVER
        return policy.first_scored(num_prompt, schedule.policy.budget(num_prompt))

    def open(self, start: int, schedule: DropSchedule, num_answer: int, seed: int) -> None:
        """Begins a sequence, none of whose rows is computed that gives scores. num_answer: the most
        tokens of its answer."""
        policy = policy_of(schedule.policy)
        first = self.first_scored(schedule, num_answer)
        last = NEVER if policy.scores_answer else schedule.num_prompt
        self._sequences[start] = _Scored(schedule, policy, first, last, seed, num_answer)

    def forget(self, start: int) -> None:
        """Ends a sequence."""
        self._sequences.pop(start, None)

    def choose(self, start: int, num_tokens: int) -> Choice:
        """Chooses the places that stay when num_tokens are computed."""
        sequence = self._sequences[start]
        assert not sequence.shorter, "layers of different lengths drop no more"
        length = num_tokens - sequence.dropped
        setting = sequence.schedule.policy
        budgets = layer_budgets(setting, setting.budget(num_tokens), self._num_layers)
        kept: list[Kept] = []
        none = np.zeros((self._num_heads, length), dtype=np.float32)
        for layer, budget in enumerate(budgets):
            scores = none if sequence.sums is None else sequence.sums[layer, :, :length]
            if budget >= length:
                whole = np.arange(length, dtype=np.int32)
                kept.append(np.ascontiguousarray(np.broadcast_to(whole, none.shape)))
            else:
                kept.append(sequence.policy.keep(scores, budget))
        return Choice(self, start, num_tokens, kept)

    def settle(self, start: int, num_tokens: int, kept: Sequence[Kept]) -> None:
        """Takes note that only these places are left of num_tokens tokens."""
        sequence = self._sequences[start]
        counts = [tokens.shape[1] for tokens in kept]
        most = max(counts)
        sequence.dropped = num_tokens - most
        if min(counts) < most:
            sequence.shorter = [most - count for count in counts]
        if sequence.schedule.next_drop(num_tokens, sequence.dropped) == NEVER:
            sequence.first_scored, sequence.sums, sequence.noise = NEVER, None, None
        for values in (sequence.sums, sequence.noise):
            if values is not None:
                for layer, tokens in enumerate(kept):
                    values[layer, :, :most] = np.take_along_axis(values[layer], tokens, axis=1)
                values[:, :, most:] = 0.0
        sequence.filled = most

    # ---- steps

    def plan(self, step: AttentionStep) -> Attention:
        sequences = [self._sequences.get(start) for start in step.starts]
        shorter = [s.shorter if s is not None else () for s in sequences]
        plan = self._layered(step, shorter) if any(shorter) else self._inner.plan(step)
        scored: list[ScoredRows] = []
        first = 0
        for sequence, start, rows, kv_len in zip(
            sequences, step.starts, step.num_rows, step.kv_lens, strict=True
        ):
            if sequence is not None and sequence.first_scored != NEVER:
                found = self._rows(sequence, start, first, rows, kv_len)
                scored += [] if found is None else [found]
            first += rows
        return _ScoringPlan(plan, self.store.scorer(scored)) if scored else plan

    def _layered(self, step: AttentionStep, shorter: Sequence[Sequence[int]]) -> Attention:
        """Returns the plan of a step in which layers have different K/V lengths."""
        plans: list[Attention] = []
        positions: dict[int, tuple[int, int]] = {}
        for group, numbers in zip(self._groups, self.layers_of, strict=True):
            found: dict[tuple[int, ...], int] = {}
            for position, layer in enumerate(numbers):
                pairs = zip(step.kv_lens, shorter, strict=True)
                lengths = tuple([length - (less[layer] if less else 0) for length, less in pairs])
                if lengths not in found:
                    found[lengths] = len(plans)
                    plans.append(group.plan(replace(step, kv_lens=lengths)))
                positions[layer] = found[lengths], position
        return GroupedPlan(plans, positions)

    def _rows(
        self, sequence: _Scored, start: int, row: int, num_rows: int, kv_len: int
    ) -> ScoredRows | None:
        """Returns those rows of a sequence that give scores, and makes room for them. row: the
        first of its num_rows rows in the step."""
        position = kv_len + sequence.dropped - num_rows
        skipped = max(0, sequence.first_scored - position)
        missing = max(0, position + num_rows - sequence.last_scored)
        if skipped + missing >= num_rows:
            return None
        self._make_room(sequence, kv_len)
        sharpness = None
        if sequence.policy.is_noisy:
            num_prompt = sequence.schedule.num_prompt
            positions = range(position + skipped, position + num_rows - missing)
            values = [1.0 / temperature(p, num_prompt, sequence.num_answer) for p in positions]
            sharpness = np.array(values, dtype=np.float32)
        assert sequence.sums is not None
        first, end = row + skipped, row + num_rows - missing
        sums, noise = sequence.sums, sequence.noise
        return ScoredRows(start, first, end, kv_len - missing, sums, noise, sharpness)

    def _make_room(self, sequence: _Scored, kv_len: int) -> None:
        shape = (self._num_layers, self._num_heads)
        room = 0 if sequence.sums is None else sequence.sums.shape[2]
        if kv_len > room:
            more = max(-(-kv_len // _TILE), room // _TILE * 5 // 4) * _TILE - room
            empty = np.zeros((*shape, more), dtype=np.float32)
            sequence.sums = _extended(sequence.sums, empty)
            if sequence.policy.is_noisy:
                sequence.noise = _extended(sequence.noise, empty)
        if sequence.noise is not None and sequence.filled < kv_len:
            first = sequence.filled
            end = min(kv_len + _NOISE_AHEAD, sequence.noise.shape[2])
            positions = first + sequence.dropped, end + sequence.dropped
            sequence.noise[:, :, first:end] = gumbel_noise(sequence.seed, *shape, *positions)
            sequence.filled = end


def _extended(values: Floats | None, more: Floats) -> Floats:
    return more.copy() if values is None else np.concatenate([values, more], axis=2)


class Choice:
    """The places of one sequence that stay. It moves their tokens to the first places of the
    range, as `EvictingKV.shrink` asks for it. counts: how many stay in each layer group, in its
    layer that keeps the most; dropped: how many of the sequence no layer has then."""

    def __init__(
        self, attention: EvictingAttention, start: int, num_computed: int, kept: Sequence[Kept]
    ) -> None:
        self._attention, self._start = attention, start
        self._num_computed, self._kept = num_computed, kept
        self.counts = [
            max(kept[layer].shape[1] for layer in numbers) for numbers in attention.layers_of
        ]
        self.dropped = num_computed - max(self.counts)

    def move(self) -> None:
        self._attention.store.move(self._start, self._kept)

    def take(self) -> object:
        return self._attention.store.take(self._start, self._kept)

    def put(self, taken: object) -> None:
        self._attention.store.put(self._start, taken)

    def settle(self) -> None:
        """Takes note that the tokens were moved."""
        self._attention.settle(self._start, self._num_computed, self._kept)


class _ScoringPlan:
    """Attention for a step some of whose rows give scores."""

    def __init__(self, inner: Attention, scorer: KeyScorer) -> None:
        self._inner, self._scorer = inner, scorer

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return self._inner.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        pending = self._inner.finish(ticket, k, v, rotation)
        self._scorer.add(ticket.layer, ticket.q)
        return pending
