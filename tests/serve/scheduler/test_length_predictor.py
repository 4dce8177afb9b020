"""Predicted lengths: against a law computed the slow way, and against known distributions."""

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
    """levels: lists of lengths, the most specific first."""

    def survival(length):
        found, left = 0.0, 1.0
        for lengths in levels:
            if lengths:
                own = len(lengths) / (len(lengths) + SHRINK)
                found += left * own * sum(n > length for n in lengths) / len(lengths)
                left *= 1 - own
        return found + left * prior(length)

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


def test_before_any_answer_stands_a_prior():
    predictor = HistoryPredictor()
    assert predictor.quantile(request(), 0, 0.5) == 128
    assert predictor.quantile(request(), 0, 0.9) == 554
    assert predictor.quantile(request(max_tokens=100), 0, 0.9) == 100


def test_a_level_with_few_answers_leans_on_the_one_above():
    """30 answers of length 10 weigh half; of a million others the median is 1,000."""
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


def test_a_growing_answer_moves_along_the_tail():
    predictor = HistoryPredictor()
    for length in range(1, 201):
        predictor.observe(request(), length)
    medians = [predictor.quantile(request(), out, 0.5) for out in (0, 50, 100, 150, 190)]
    assert medians == sorted(medians)
    assert [round(m, -1) for m in medians[:3]] == [100, 130, 150]
    beyond = predictor.quantile(request(), 300, 0.5)
    assert 400 < beyond < 700, "longer than all: it goes on for about as long again"


def test_the_request_sets_the_bounds():
    predictor = HistoryPredictor()
    for _ in range(200):
        predictor.observe(request(), 50)
    assert predictor.quantile(request(max_tokens=20), 0, 0.5) == 20
    assert predictor.quantile(request(max_tokens=20), 19, 0.01) == 20
    assert predictor.quantile(request(min_tokens=80), 0, 0.5) == 80
    assert predictor.quantile(request(ignore_eos=True, max_tokens=700), 0, 0.1) == 700
    assert predictor.quantile(request(ignore_eos=True, stop="x", max_tokens=700), 0, 0.1) < 60


def test_lengths_that_were_asked_for_teach_nothing():
    predictor = HistoryPredictor()
    wished = request(ignore_eos=True, max_tokens=700)
    for _ in range(100):
        predictor.observe(wished, 700)
        predictor.observe_cut(wished, 700)
    assert len(predictor) == 0
    assert predictor.quantile(request(), 0, 0.5) == 128


def test_memory_is_bounded_and_the_old_is_forgotten():
    predictor = HistoryPredictor(window=20, max_keys=6)
    for i in range(50):
        predictor.observe(request(f"client-{i}"), 10)
        predictor.observe(request("regular"), 10)
        assert len(predictor) <= 6
    for _ in range(100):
        predictor.observe(request("regular"), 400)
    assert predictor.quantile(request("regular"), 0, 0.2) == 400, "a third were 10"


@pytest.mark.parametrize("cut_at", [100, 150])
def test_cut_answers_are_longer_than_they_look(cut_at):
    """Two in three clients hang up early; the third shows how long answers really are."""
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


def test_a_client_that_always_cuts_does_not_run_away():
    predictor = HistoryPredictor()
    for _ in range(3000):
        predictor.observe_cut(request(max_tokens=64), 64)
    assert 64 <= predictor.quantile(request(), 0, 0.99) <= 130


def test_calibration_on_known_distributions():
    """Two clients whose answers differ tenfold: predicted before each answer, then observed."""
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


class Mine:
    """A user's predictor that says what it is told to."""

    def __init__(self, says=7):
        self.says = says
        self.observed = []

    def quantile(self, request, num_output, level):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def observe(self, request, num_output):
        self.observed.append(num_output)

    def observe_cut(self, request, num_output):
        raise RuntimeError("no")


def test_a_users_predictor_is_asked_and_told():
    mine = Mine(1_000_000)
    with LLM(
        str(checkpoint("llama")), length_predictor=mine, kv_cache_bytes=4 << 20, max_num_seqs=2
    ) as llm:
        llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False
        )
        policy = llm._loaded.core._scheduler.policy
        assert isinstance(policy.predictor, GuardedPredictor)
        assert len(mine.observed) <= 1


@pytest.mark.parametrize(("says", "expected"), [(7, 7), (1e9, 50), (-3, 6), (5.9, 6)])
def test_what_a_predictor_says_is_kept_in_bounds(says, expected):
    asking = make_request(num_tokens=50)
    assert GuardedPredictor(Mine(says)).quantile(asking, 5, 0.5) == expected


@pytest.mark.parametrize("says", [ValueError("bad"), None, float("nan"), float("inf")])
def test_past_answers_predict_where_a_predictor_fails(says, caplog):
    mine = Mine(says)
    if says is None:
        mine.says = "nothing"
    guarded, history = GuardedPredictor(mine), HistoryPredictor()
    asking = make_request(num_tokens=50)
    for predictor in (guarded, history):
        predictor.observe(asking, 9)
        predictor.observe_cut(asking, 9)
    for level in (0.1, 0.5, 0.9):
        assert guarded.quantile(asking, 5, level) == history.quantile(asking, 5, level)
    assert caplog.text.count("length_predictor failed") == 1
    assert mine.observed == [9]


@pytest.mark.parametrize(
    "settings",
    [{"length_predictor": object()}, {"length_predictor": Mine(), "memory_policy": "worst_case"}],
)
def test_a_predictor_that_cannot_be_used(settings):
    with pytest.raises(ConfigError, match="length_predictor"):
        EngineConfig(**settings)
