"""The learned predictor is accurate where something can be learned, calibrated, never much worse
than past answers, and not spoiled by one client."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from statistics import fmean

import numpy as np
import pytest

from serve.kept import size_of
from serve.prediction.features import SKETCH_SIZE
from serve.prediction.learned import ARRIVED, COMPUTED, LearnedPredictor
from serve.request import FinishReason
from serve.scheduler.length_predictor import HistoryPredictor, SequencePredictor
from serve.scheduler.sequence import make_sequences
from tests.support.engine.fakes import make_request

NEVER = frozenset()


def sequence_of(prompt, client=None, max_tokens=4000, **params):
    request = make_request(num_tokens=max_tokens, prompt=prompt, **params)
    return make_sequences(replace(request, client=client), frozenset({1}))[0]


def grow(sequence, num_output):
    sequence.token_ids = [*sequence.request.prompt_token_ids, *[7] * num_output]


def sketch_of(factor, rng):
    sketch = rng.normal(size=SKETCH_SIZE)
    sketch[3] = factor
    return sketch


class World:
    """Answers whose length depends on the prompt's last token, or on a number of the state."""

    def __init__(self, predictor, seed=0):
        self.predictor = predictor
        self.rng = np.random.default_rng(seed)
        self.errors = []  # of the logarithms, on arrival and when the prompt is computed
        self.within = []

    def serve(self, client=None, *, by_token=False, by_state=False, flip=False, is_cut=False):
        long = bool(self.rng.integers(2))
        state = float(self.rng.normal())
        scale = (4.0 if long else 0.25) if by_token else 1.0
        scale *= float(np.exp(1.2 * state)) if by_state else 1.0
        scale = 1 / scale if flip else scale
        length = max(1, round(60 * scale * float(np.exp(0.2 * self.rng.normal()))))
        sequence = sequence_of((5, 6, 11 if long else 12), client)
        self.predictor.arrived(sequence)
        arrived = self.predictor.quantile(sequence, 0.5)
        self.predictor.saw_state(sequence, 0, sketch_of(state, self.rng))
        median, p90 = (self.predictor.quantile(sequence, level) for level in (0.5, 0.9))
        self.errors.append((abs(log(length / arrived)), abs(log(length / median))))
        self.within.append((length <= median, length <= p90))
        grow(sequence, length // 2 if is_cut else length)
        self.predictor.ended(sequence, is_whole=not is_cut)

    def error(self, stage, last=200):
        return fmean(pair[stage] for pair in self.errors[-last:])


def test_a_prompts_last_token_is_learned():
    world, past = World(LearnedPredictor()), World(SequencePredictor(HistoryPredictor()))
    for _ in range(300):
        world.serve(by_token=True)
        past.serve(by_token=True)
    assert past.error(ARRIVED) > 1.0
    assert world.error(ARRIVED) < 0.3


def test_a_hidden_state_is_learned_and_calibrated():
    world = World(LearnedPredictor())
    for _ in range(1200):
        world.serve(by_state=True)
    assert world.error(ARRIVED) > 0.7, "nothing shows on arrival"
    assert world.error(COMPUTED) < 0.3
    p50, p90 = (fmean(pair[i] for pair in world.within[-600:]) for i in range(2))
    assert 0.44 < p50 < 0.56
    assert 0.86 < p90 < 0.96


def test_where_nothing_can_be_learned_past_answers_predict():
    world, past = World(LearnedPredictor()), World(SequencePredictor(HistoryPredictor()))
    for _ in range(400):
        world.serve()
        past.serve()
    assert world.error(COMPUTED) < past.error(COMPUTED) + 0.05


@pytest.mark.parametrize("is_known", [False, True])
def test_one_client_cannot_spoil_the_predictor_for_another(is_known):
    """A hostile client's answers contradict those of the other, ten to one."""
    world, alone = World(LearnedPredictor()), World(LearnedPredictor())
    if is_known:
        for _ in range(200):
            world.serve("good", by_token=True)
            alone.serve("good", by_token=True)
    errors = []
    for _ in range(400):
        for _ in range(10):
            world.serve("bad", by_token=True, flip=True)
        world.serve("good", by_token=True)
        errors.append(world.errors[-1])
        alone.serve("good", by_token=True)
    past = World(SequencePredictor(HistoryPredictor()))
    for _ in range(300):
        past.serve("good", by_token=True)
    for stage in (ARRIVED, COMPUTED):
        assert fmean(pair[stage] for pair in errors[-200:]) < past.error(stage) + 0.15
    assert world.predictor._num_taught["bad"] <= world.predictor._num_taught["good"] + 64


def test_hostile_numbers_do_no_harm():
    predictor = LearnedPredictor()
    for number in range(300):
        sequence = sequence_of((number,), max_tokens=1 << 40)
        predictor.arrived(sequence)
        predictor.saw_state(sequence, 0, np.full(SKETCH_SIZE, [np.nan, np.inf, -1e300][number % 3]))
        grow(sequence, 1 + 999 * (number % 2))
        predictor.ended(sequence, is_whole=number % 5 != 0)
    sequence = sequence_of((3,), max_tokens=50)
    predictor.arrived(sequence)
    assert 1 <= predictor.quantile(sequence, 0.0) <= predictor.quantile(sequence, 1.0) <= 50
    assert all(np.isfinite(value).all() for value in predictor.state().values())


def test_quantiles_rise_and_follow_a_growing_answer():
    world = World(LearnedPredictor())
    for _ in range(300):
        world.serve(by_state=True)
    sequence = sequence_of((5, 6, 11), max_tokens=900)
    world.predictor.arrived(sequence)
    world.predictor.saw_state(sequence, 0, sketch_of(-1.0, world.rng))
    last = 0
    for num_output in (0, 1, 20, 60, 300, 898, 899):
        grow(sequence, num_output)
        levels = [world.predictor.quantile(sequence, i / 10) for i in range(11)]
        assert levels == sorted(levels)
        assert num_output < levels[0] and levels[-1] <= 900
        assert levels[5] >= last
        last = levels[5]


def test_an_answer_that_was_cut_counts_as_longer():
    whole, cut = World(LearnedPredictor()), World(LearnedPredictor())
    for _ in range(300):
        whole.serve(by_state=True)
        cut.serve(by_state=True, is_cut=True)
    sequence = sequence_of((5, 6, 11))
    for world in (whole, cut):
        world.predictor.arrived(sequence)
    medians = [world.predictor.quantile(sequence, 0.5) for world in (whole, cut)]
    assert medians[1] > 0.5 * medians[0]


def test_fixed_lengths_and_aborted_prompts_teach_nothing():
    predictor = LearnedPredictor()
    for _ in range(40):
        fixed = sequence_of((1, 2), max_tokens=30, ignore_eos=True)
        fixed.stop_ids = NEVER
        predictor.arrived(fixed)
        assert predictor.quantile(fixed, 0.1) == 30
        grow(fixed, 30)
        fixed.finish_reason = FinishReason.LENGTH
        predictor.ended(fixed, is_whole=False)
        aborted = sequence_of((1, 2))
        predictor.arrived(aborted)
        predictor.ended(aborted, is_whole=False)
    assert predictor.num_learned == 0
    assert not predictor._seen


def test_what_is_kept_is_bounded():
    predictor, rng = LearnedPredictor(), random.Random(0)
    for number in range(1500):
        sequence = sequence_of((number,), client=f"client {number}", max_tokens=10**6)
        predictor.arrived(sequence)
        for step in range(80 if number == 0 else 1):
            grow(sequence, step)
            predictor.saw_state(sequence, step, np.zeros(SKETCH_SIZE))
        assert len(predictor._seen[sequence]) <= 64
        grow(sequence, rng.randint(80, 90))
        predictor.ended(sequence, is_whole=True)
    assert not predictor._seen
    assert len(predictor.histories) <= 1024
    assert all(len(stage.errors) <= 1024 for stage in predictor.stages)
    assert all(len(stage.ratios.histories) <= 1024 for stage in predictor.stages)
    assert len(predictor._teachers) <= 2048
    kept = size_of(*predictor.tables)
    assert kept.entries <= 1024
    assert 200_000 < kept.num_bytes < 8 << 20
