"""Forecasts of memory count the steps of sequences that get several tokens a step."""

from __future__ import annotations

import random

import pytest

from serve.scheduler.admission import OraclePolicy
from tests.serve.scheduler.test_admission import EOS, Rig
from tests.support.engine.fakes import make_kv


class RightDrafts:
    """Drafting whose sequences with even numbers get three tokens a step more than the others."""

    def __init__(self, kv):
        self._kv = kv

    def reserve(self, num_rows):
        return 0

    def extend(self, plan, num_certain, num_rows, limit_s=0.0):
        for i, sequence in enumerate(plan.sequences[:num_certain]):
            sequence.draft_ids = []
            most = min(3, sequence.max_tokens_total - sequence.num_tokens - 1)
            target, need = sequence.kv_range, sequence.num_tokens + most
            if not self.is_fast(sequence) or most < 1 or num_rows < most:
                continue
            if self._kv.grow(target, need, sequence.num_computed_tokens):
                sequence.draft_ids = [7] * most
                plan.num_rows[i] += most
                plan.num_total_rows += most
                plan.num_drafted += most
                num_rows -= most

    def is_fast(self, sequence):
        return int(sequence.request.request_id) % 2 == 0

    def tokens_per_step(self, sequence):
        return 4.0 if self.is_fast(sequence) else 1.0

    def learn(self, sequence, num_drafted, num_accepted):
        """Nothing is learned."""

    def ended(self, sequence):
        """Nothing is kept."""


class DraftedRig(Rig):
    """A scheduler whose steps have drafts, all of which agree."""

    def __init__(self, *, knows):
        """knows: the forecasts know how many tokens a step gives."""
        super().__init__("oracle", num_pages=64, rows=256)
        self.scheduler.drafting = RightDrafts(self.kv)
        if knows:
            self.policy.tokens_per_step = self.scheduler.drafting.tokens_per_step

    def step(self):
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        self.kv.commit()
        tokens, counts = [], []
        for i, sequence in enumerate(plan.sequences):
            if plan.samples[i]:
                count = plan.num_rows[i] if i < plan.num_decodes else 1
                left = max(1, self.length(sequence) - sequence.num_output_tokens)
                own = [7] * count if count < left else [7] * (left - 1) + [EOS]
                tokens, counts = tokens + own, [*counts, len(own)]
        self.ended.extend(self.scheduler.update(plan, tokens, counts))


def served(*, knows):
    rig, rng = DraftedRig(knows=knows), random.Random(5)
    for _ in range(200):
        rig.add(rng.randint(1, 30), rng.randint(1, 60))
    rig.run()
    return rig


def test_sequences_that_get_several_tokens_are_preempted_less():
    known, unknown = served(knows=True), served(knows=False)
    assert len(known.ended) == len(unknown.ended) == 200
    assert known.scheduler.num_preemptions < 0.5 * unknown.scheduler.num_preemptions
    assert known.scheduler.num_steps < 1.05 * unknown.scheduler.num_steps


def test_entries_follow_what_sequences_get():
    """An entry that says one token a step is made anew when it is wrong by more than a few."""
    rig = DraftedRig(knows=False)
    rig.policy.tokens_per_step = lambda sequence: 1.0
    for length in (50, 50, 40, 60):
        rig.add(4, length)
    for _ in range(9):
        rig.step()
    policy, step = rig.policy, rig.scheduler.num_passes
    policy._settle(policy._forecasts, step)
    assert isinstance(policy, OraclePolicy)
    for member in policy._members.values():
        _, start, _ = member.entries[0]
        assert abs(start + step - member.sequence.num_tokens) <= 16


@pytest.mark.parametrize("speed", [1.0, 2.0, 5.0])
def test_the_steps_that_are_left(speed):
    kv, _ = make_kv(64)
    policy = OraclePolicy(kv, lambda sequence: 60, 64)
    rig = Rig(lambda kv, rows: policy)
    policy.tokens_per_step = lambda sequence: speed
    sequence = rig.add(4, 60)
    policy.started(sequence, 10)
    assert policy.steps_left(10) == [pytest.approx(60 / speed, abs=1)]
    assert policy.mean_steps() == 60 / speed
