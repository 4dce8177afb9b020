"""Predicted lengths match a naive computation and known distributions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.scheduler.length_predictor import GuardedPredictor, HistoryPredictor
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import make_request

SHRINK = 30


def request(client="a", num_prompt=5, max_tokens=4000, **params):
    return replace(make_request(num_prompt, num_tokens=max_tokens, **params), client=client)


def prior(length):
    return 1 / (1 + (length / 128) ** 1.5)


def slow_quantile(levels, num_output, level, longest):
    """Computes the quantile naively; levels: lists of lengths, the most specific first."""

    def survival(length):
        total, left = 0.0, 1.0
        for lengths in levels:
            if lengths:
                own = len(lengths) / (len(lengths) + SHRINK)
                total += left * own * sum(n > length for n in lengths) / len(lengths)
                left *= 1 - own
        return total + left * prior(length)

    allowed = (1 - level) * survival(num_output)
    for length in range(num_output + 1, longest):
        if survival(length) <= allowed:
            return length
    return longest


def test_quantiles_are_those_of_the_mixture():
    rng = random.Random(0)
    predictor = HistoryPredictor(window=50)
    seen = []  # (client, bucket, length)
    for _ in range(300):
        client, num_prompt = rng.choice("abc"), rng.choice([3, 9, 40])
        length = rng.randint(1, 300)
        predictor.observe(request(client, num_prompt), length)
        seen.append((client, num_prompt.bit_length(), length))
    for _ in range(60):
        client, num_prompt = rng.choice("abcx"), rng.choice([3, 9, 40, 90])
        num_output, level = rng.choice([0, 1, 50, 299, 400]), rng.random()
        bucket = num_prompt.bit_length()
        own = [n for c, b, n in seen if (c, b) == (client, bucket)][-50:]
        of_client = [n for c, _, n in seen if c == client][-50:]
        overall = [n for _, _, n in seen][-200:]
        expected = slow_quantile([own, of_client, overall], num_output, level, 900)
        found = predictor.quantile(request(client, num_prompt, 900), num_output, level)
        assert found == expected, (client, num_prompt, num_output, level)


def test_the_prior_predicts_before_any_answer():
    predictor = HistoryPredictor()
    assert predictor.quantile(request(), 0, 0.5) == 128
    assert predictor.quantile(request(), 0, 0.9) == 554
    assert predictor.quantile(request(max_tokens=100), 0, 0.9) == 100


def test_a_level_with_few_answers_uses_the_level_above():
    """A client's n answers weigh n / (n + 30) beside all others, whose median is 1,000."""
    predictor = HistoryPredictor(window=1000)
    for _ in range(1000):
        predictor.observe(request("other"), 1000)
    assert predictor.quantile(request("new"), 0, 0.4) == 1000
    for count, level, expected in ((10, 0.2, 10), (10, 0.6, 1000), (200, 0.8, 10)):
        fresh = HistoryPredictor(window=1000)
        for _ in range(1000):
            fresh.observe(request("other"), 1000)
        for _ in range(count):
            fresh.observe(request("new"), 10)
        assert fresh.quantile(request("new"), 0, level) == expected, (count, level)


def test_a_growing_answer_is_predicted_by_the_tail():
    predictor = HistoryPredictor()
    for length in range(1, 201):
        predictor.observe(request(), length)
    medians = [predictor.quantile(request(), out, 0.5) for out in (0, 50, 100, 150, 190)]
    assert medians == sorted(medians)
    assert [round(m, -1) for m in medians[:3]] == [100, 130, 150]
    beyond = predictor.quantile(request(), 300, 0.5)
    assert 400 < beyond < 700, "an answer longer than all others is expected to double"


def test_the_request_sets_the_bounds():
    predictor = HistoryPredictor()
    for _ in range(200):
        predictor.observe(request(), 50)
    assert predictor.quantile(request(max_tokens=20), 0, 0.5) == 20
    assert predictor.quantile(request(max_tokens=20), 19, 0.01) == 20
    assert predictor.quantile(request(min_tokens=80), 0, 0.5) == 80
    assert predictor.quantile(request(ignore_eos=True, max_tokens=700), 0, 0.1) == 700
    assert predictor.quantile(request(ignore_eos=True, stop="x", max_tokens=700), 0, 0.1) < 60


def test_lengths_fixed_by_the_request_are_not_learned():
    predictor = HistoryPredictor()
    fixed = request(ignore_eos=True, max_tokens=700)
    for _ in range(100):
        predictor.observe(fixed, 700)
        predictor.observe_cut(fixed, 700)
    assert len(predictor) == 0
    assert predictor.quantile(request(), 0, 0.5) == 128


def test_memory_is_bounded_and_old_lengths_are_dropped():
    predictor = HistoryPredictor(window=20, max_keys=6)
    for i in range(50):
        predictor.observe(request(f"client-{i}"), 10)
        predictor.observe(request("regular"), 10)
        assert len(predictor) <= 6
    for _ in range(100):
        predictor.observe(request("regular"), 400)
    assert predictor.quantile(request("regular"), 0, 0.2) == 400, "a third were 10"


@pytest.mark.parametrize("cut_at", [100, 150])
def test_cut_answers_count_as_lower_bounds(cut_at):
    """Two thirds of the clients disconnect early; the others show the true distribution."""
    rng = random.Random(1)
    predictor, naive = HistoryPredictor(window=1000), HistoryPredictor(window=1000)
    lengths = []
    for i in range(1500):
        length = 1 + int(rng.expovariate(1 / 100))
        lengths.append(length)
        if i % 3 and length > cut_at:
            predictor.observe_cut(request(), cut_at)
            naive.observe(request(), cut_at)
        else:
            predictor.observe(request(), length)
            naive.observe(request(), length)
    for level in (0.5, 0.9):
        real = sorted(lengths)[int(level * len(lengths))]
        assert abs(predictor.quantile(request(), 0, level) - real) < 0.15 * real
    real = sorted(lengths)[int(0.9 * len(lengths))]
    assert naive.quantile(request(), 0, 0.9) < 0.85 * real


def test_predictions_stay_bounded_for_a_client_that_always_cuts():
    predictor = HistoryPredictor()
    for _ in range(3000):
        predictor.observe_cut(request(max_tokens=64), 64)
    assert 64 <= predictor.quantile(request(), 0, 0.99) <= 130


def test_calibration_on_known_distributions():
    """Two clients have answers that differ tenfold; each answer is predicted, then observed."""
    rng = random.Random(2)
    predictor = HistoryPredictor()
    within = {0.5: 0, 0.9: 0}
    for i in range(3000):
        asked = request(rng.choice("ab"), rng.choice([4, 30]))
        length = 1 + int(rng.lognormvariate(3.5 if asked.client == "a" else 5.8, 0.8))
        if i >= 300:
            for level in within:
                within[level] += length <= predictor.quantile(asked, 0, level)
        predictor.observe(asked, min(length, 4000))
    assert 0.47 < within[0.5] / 2700 < 0.53
    assert 0.88 < within[0.9] / 2700 < 0.92


class CustomPredictor:
    """A user's predictor that returns or raises a given value."""

    def __init__(self, value=7):
        self.value = value
        self.observed = []

    def quantile(self, request, num_output, level):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def observe(self, request, num_output):
        self.observed.append(num_output)

    def observe_cut(self, request, num_output):
        raise RuntimeError("no")


def test_a_users_predictor_is_used_and_observes():
    custom = CustomPredictor(1_000_000)
    with LLM(
        str(checkpoint("llama")), length_predictor=custom, kv_cache_bytes=4 << 20, max_num_seqs=2
    ) as llm:
        llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False
        )
        policy = llm._loaded.core._scheduler.policy
        assert isinstance(policy.lengths._predictor, GuardedPredictor)
        assert len(custom.observed) <= 1


@pytest.mark.parametrize(("value", "expected"), [(7, 7), (1e9, 50), (-3, 6), (5.9, 6)])
def test_predictions_are_clamped(value, expected):
    request_of_50 = make_request(num_tokens=50)
    assert GuardedPredictor(CustomPredictor(value)).quantile(request_of_50, 5, 0.5) == expected


@pytest.mark.parametrize("value", [ValueError("bad"), None, float("nan"), float("inf")])
def test_history_predicts_where_a_custom_predictor_fails(value, caplog):
    custom = CustomPredictor(value)
    if value is None:
        custom.value = "nothing"
    guarded, history = GuardedPredictor(custom), HistoryPredictor()
    request_of_50 = make_request(num_tokens=50)
    for predictor in (guarded, history):
        predictor.observe(request_of_50, 9)
        predictor.observe_cut(request_of_50, 9)
    for level in (0.1, 0.5, 0.9):
        assert guarded.quantile(request_of_50, 5, level) == history.quantile(
            request_of_50, 5, level
        )
    assert caplog.text.count("length_predictor failed") == 1
    assert custom.observed == [9]


@pytest.mark.parametrize(
    "settings",
    [
        {"length_predictor": object()},
        {"length_predictor": CustomPredictor(), "memory_policy": "worst_case"},
    ],
)
def test_an_unusable_predictor_is_refused(settings):
    with pytest.raises(ConfigError, match="length_predictor"):
        EngineConfig(**settings)
