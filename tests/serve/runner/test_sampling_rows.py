"""Sampling on the device gives the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from serve.runner.sampler import sample
from serve.runner.sampling_rows import rows_of, sampled
from serve.scheduler.sequence import PENDING_TOKEN
from serve.structured.bits import bits_of
from serve.structured.token_mask import SequenceMask
from tests.support.cuda.device_sampling import make_sampler, step
from tests.support.engine.fakes import make_seq

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZE = 120
# sampling with these parameters does not depend on the order of the draws
KINDS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1e-6},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.1, "min_p": 0.05, "top_k": 0},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5},
    {"logit_bias": {5: 3.0, 6: -5.0}, "min_tokens": 4, "temperature": 0.7},
    {"min_tokens": 3, "logprobs": 3},
    {"temperature": 0.8, "logprobs": 0, "presence_penalty": 1.0},
]


def sequences():
    return [
        make_seq(3, frozenset({6, 7}), request_id=str(i), seed=i, **kind)
        for i, kind in enumerate(KINDS)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_late", [False, True])
def test_tokens_are_those_of_the_cpu(is_late):
    """is_late: the host gets each token one step later."""
    on_cpu, on_device = sequences(), sequences()
    sampler = make_sampler(SIZE)
    generator = torch.Generator().manual_seed(4)
    late: list[int] = []
    for _ in range(4):
        logits = torch.randn(len(KINDS), SIZE, generator=generator) * 2
        logits[:, 6:8] += 3  # makes EOS likely
        expected = sample(logits.clone(), on_cpu)
        rows = rows_of(on_device, range(len(KINDS)))
        plan, tokens = step(sampler, logits, rows)
        got = sampled(plan, sampler.fetch(plan.kind, len(KINDS)))
        assert got.token_ids == tokens == expected.token_ids
        assert_same_logprobs(got.logprobs, expected.logprobs)
        for i, token in enumerate(tokens):
            on_cpu[i].token_ids.append(token)
            if late:
                on_device[i].token_ids[-1] = late[i]
            on_device[i].token_ids.append(PENDING_TOKEN if is_late else token)
        late = tokens if is_late else []


def test_each_sequence_has_its_own_mask():
    def masked():
        result = sequences()
        for i, sequence in enumerate(result):
            if i % 2:
                sequence.mask = SequenceMask(
                    SIZE,
                    num_prompt=3,
                    allowed=bits_of(range(i, SIZE, 11), SIZE),
                    stop_ids=sequence.stop_ids,
                    min_output=sequence.request.params.min_tokens,
                )
                sequence.mask.fill(sequence.token_ids)
        return result

    logits = torch.randn(len(KINDS), SIZE, generator=torch.Generator().manual_seed(5)) * 2
    expected = sample(logits.clone(), masked())
    sampler = make_sampler(SIZE)
    plan, tokens = step(sampler, logits, rows_of(masked(), range(len(KINDS))))
    assert tokens == expected.token_ids
    assert all((token - i) % 11 == 0 for i, token in enumerate(tokens) if i % 2)
    got = sampled(plan, sampler.fetch(plan.kind, len(KINDS)))
    assert_same_logprobs(got.logprobs, expected.logprobs)


def assert_same_logprobs(got, expected):
    for each, reference in zip(got, expected, strict=True):
        assert (each is None) == (reference is None)
        if reference is None:
            continue
        assert (each.token_id, each.rank) == (reference.token_id, reference.rank)
        assert each.logprob == pytest.approx(reference.logprob, abs=1e-5)
        assert [token for token, _ in each.top] == [token for token, _ in reference.top]
        values = [value for _, value in reference.top]
        assert [value for _, value in each.top] == pytest.approx(values, abs=1e-5)


def test_greedy_steps_are_recognized():
    sampler = make_sampler(SIZE)
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(4))
    rows = rows_of([make_seq(3), make_seq(5)], [7, 2])
    plan, tokens = step(sampler, logits, rows)
    assert plan.kind == 0
    assert sampled(plan, sampler.fetch(plan.kind, 2)) == (logits.argmax(-1).tolist(), None)
    assert sampler.last_tokens[[7, 2]].tolist() == tokens
