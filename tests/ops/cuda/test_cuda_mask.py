"""Masked rows on the device equal rows with minus infinity written by hand."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from serve.structured.bits import bits_of
from tests.support.cuda.device_sampling import make_sampler, step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CUTS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7, "biases": {3: 2.0}},
    {"temperature": 0.0, "num_logprobs": 3},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [5, 32, 300, 600])
def test_only_allowed_tokens_are_drawn(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(len(CUTS) * 2, size, generator=generator) * 2
    allowed = torch.rand(logits.shape, generator=generator) < 0.3
    allowed[:, size // 2] = True
    allowed[::2] = True  # every other row has no mask
    choices = [cut for cut in CUTS for _ in range(2)]

    def rows(is_masked):
        return [
            Row(
                DeviceSamplingInputs(seed=i, **choice),
                i,
                [0] * 4,
                mask=bits_of(torch.nonzero(allowed[i])[:, 0].tolist(), size)
                if is_masked and i % 2
                else None,
            )
            for i, choice in enumerate(choices)
        ]

    sampler = make_sampler(size)
    plan, tokens = step(sampler, logits, rows(True))
    logprobs = sampler.fetch(plan.kind, len(choices)).logprobs
    by_hand = step(make_sampler(size), logits.masked_fill(~allowed, float("-inf")), rows(False))[1]
    assert tokens == by_hand
    raw = torch.log_softmax(logits.double(), -1)
    expected = [float(raw[i, token]) for i, token in enumerate(tokens)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    # a step without masks does not use the previous step's
    assert step(sampler, logits, rows(False))[1] == step(make_sampler(size), logits, rows(False))[1]
