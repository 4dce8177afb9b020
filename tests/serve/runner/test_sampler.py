"""Sampling follows its definition: distributions, cuts, penalties, independence of the batch."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import sampling
from serve.runner.sampler import sample, sample_with_torch, uniform
from tests.support.engine.fakes import make_seq


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request, monkeypatch):
    """Runs every test with the native kernels and without them."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "is_available", lambda: False)
    elif not sampling.is_available():
        pytest.skip("not built")
    return request.param


def seqs(count, **params):
    return [make_seq(3, seed=i, request_id=str(i), **params) for i in range(count)]


def draw(logits, count, **params):
    """Returns the token of each of `count` seeds for one row of logits."""
    rows = logits[None].repeat(count, 1)
    return sample(rows, seqs(count, **params)).token_ids


def frequencies(tokens, size):
    return torch.bincount(torch.tensor(tokens), minlength=size).double() / len(tokens)


def test_greedy_takes_the_largest():
    logits = torch.randn(6, 50)
    assert sample(logits.clone(), seqs(6)).token_ids == logits.argmax(-1).tolist()


def test_uniform_is_uniform_and_repeatable():
    u = uniform(list(range(20000)), [3] * 20000)
    assert torch.equal(u, uniform(list(range(20000)), [3] * 20000))
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # chi-square, 19 degrees, p ~ 0.001
    along = uniform([5] * 20000, list(range(20000)))
    assert float(((torch.histc(along, 20, 0, 1) - 1000) ** 2 / 1000).sum()) < 45
    assert abs(float(torch.corrcoef(torch.stack([along[:-1], along[1:]]))[0, 1])) < 0.03


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature(temperature):
    logits = torch.randn(12)
    got = frequencies(draw(logits, 20000, temperature=temperature), 12)
    expected = torch.softmax(logits.double() / temperature, -1)
    assert float((got - expected).abs().max()) < 0.015


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.0}, 1),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"top_k": 2, "top_p": 0.56}, 1),
        ({"min_p": 0.51}, 2),
        ({"min_p": 0.11}, 4),
    ],
)
def test_cuts(params, kept):
    """The probabilities are 0.4, 0.3, 0.2, 0.06 and 0.04."""
    probs = torch.tensor([0.06, 0.4, 0.2, 0.04, 0.3]).double()
    got = frequencies(draw(probs.log().float(), 20000, temperature=1.0, **params), 5)
    best = torch.argsort(probs, descending=True)[:kept]
    expected = torch.zeros(5).double()
    expected[best] = probs[best] / probs[best].sum()
    assert float((got - expected).abs().max()) < 0.015


def test_top_p_on_a_flat_distribution_sorts_everything():
    logits = torch.zeros(3000)
    logits[::2] += 1e-3
    tokens = draw(logits, 4000, temperature=1.0, top_p=0.45)
    assert all(token % 2 == 0 for token in tokens)
    assert len(set(tokens)) > 800


def test_a_row_draws_the_same_token_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(9, 400)
    kinds = [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 7},
        {"temperature": 0.8, "top_p": 0.8},
        {},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_k": 300, "top_p": 0.9},
    ]
    rows = [make_seq(4, seed=i, request_id=str(i), **kinds[i % 6]) for i in range(9)]
    together = sample(logits.clone(), rows).token_ids
    alone = [sample(logits[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(9)]
    assert together == alone
    order = [4, 8, 1, 0, 7, 3, 2, 6, 5]
    shuffled = sample(logits[order].clone(), [rows[i] for i in order]).token_ids
    assert shuffled == [together[i] for i in order]


def test_penalties():
    sequence = make_seq(2, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    sequence.token_ids += [3, 3, 4]  # prompt is 10, 11
    logits = torch.zeros(1, 20)
    logits[0, [3, 10]] = 4.0
    logits[0, 4] = -4.0
    sample(logits, [sequence])
    assert float(logits[0, 10]) == 2.0  # seen in the prompt: divided
    assert float(logits[0, 3]) == 4.0 / 2 - 2 * 0.5 - 1.0
    assert float(logits[0, 4]) == -8.0 - 0.5 - 1.0  # negative: multiplied
    assert float(logits[0, 5]) == 0.0


def test_logit_bias_and_min_tokens():
    sequence = make_seq(2, eos=frozenset({6}), logit_bias={5: 100.0}, min_tokens=2)
    assert sample(torch.zeros(1, 20), [sequence]).token_ids == [5]
    eager = make_seq(2, eos=frozenset({6}), min_tokens=2)
    logits = torch.zeros(1, 20)
    logits[0, 6] = 10.0
    assert sample(logits.clone(), [eager]).token_ids != [6]
    eager.token_ids += [1, 1]
    assert sample(logits.clone(), [eager]).token_ids == [6]


def test_logprobs_are_of_the_raw_logits():
    logits = torch.randn(3, 30)
    rows = [
        make_seq(2, logprobs=4, temperature=0.3, top_k=2),
        make_seq(2),
        make_seq(2, logprobs=0, logit_bias={7: 100.0}),
    ]
    result = sample(logits.clone(), rows)
    expected = torch.log_softmax(logits, -1)
    first, none, biased = result.logprobs
    assert none is None
    assert [token for token, _ in first.top] == torch.topk(logits[0], 4).indices.tolist()
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]))
    assert biased.token_id == 7
    assert biased.top == ()
    assert biased.logprob == pytest.approx(float(expected[2, 7]))
    assert biased.rank == int((expected[2] > expected[2, 7]).sum()) + 1


MIXED = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "presence_penalty": 0.7},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": -0.4, "logprobs": 3},
    {"logprobs": 2, "repetition_penalty": 0.8, "logit_bias": {4: 1.5, 900: -2.0}},
    {"temperature": 1.0, "logprobs": 5, "min_tokens": 8},
]


def test_native_and_torch_sampling_are_equal(kernels):
    torch.manual_seed(4)
    for vocab in (1000, 20000):
        logits = torch.randn(21, vocab) * 3
        rows = [
            make_seq(3, seed=i, request_id=str(i), eos=frozenset({5}), **MIXED[i % len(MIXED)])
            for i in range(21)
        ]
        for i, row in enumerate(rows):
            row.token_ids += [i, 7, 7, i, 12]
        mine, theirs = logits.clone(), logits.clone()
        got, expected = sample(mine, rows), sample_with_torch(theirs, rows)
        assert got.token_ids == expected.token_ids
        assert torch.equal(mine, theirs)
        for one, other in zip(got.logprobs, expected.logprobs, strict=True):
            if other is None:
                assert one is None
                continue
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=2e-5)


def test_penalties_follow_the_tokens_of_each_step():
    sequence = make_seq(2, presence_penalty=1.0)
    logits = torch.zeros(1, 20)
    sample(logits, [sequence])
    assert not logits.any()
    for token in (3, 3, 6):
        sequence.token_ids.append(token)
        logits = torch.zeros(1, 20)
        sample(logits, [sequence])
        seen = torch.zeros(20)
        seen[sequence.token_ids[2:]] = -1.0
        assert torch.equal(logits[0], seen)


@pytest.mark.parametrize("change", ["double", "column"])
def test_other_dtypes_and_layouts_are_accepted(change):
    logits = torch.randn(2, 50)
    other = logits.double() if change == "double" else logits.T.contiguous().T
    assert sample(other, seqs(2)).token_ids == logits.argmax(-1).tolist()


def test_no_rows():
    assert sample(torch.zeros(0, 50), []).token_ids == []
