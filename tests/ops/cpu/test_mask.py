"""A row with a mask samples the same token as with minus infinity where the mask has no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.cpu import sampling
from serve.runner.sampler import sample_with_torch
from serve.structured.bits import bits_of
from tests.support.engine.fakes import make_seq

pytestmark = pytest.mark.skipif(not sampling.is_available(), reason="not built")

SIZES = [1, 5, 31, 32, 33, 1024, 1057, 20000]
CUTS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "biases": {0: 3.0}},
]


def masks_of(kind, rows, size):
    generator = torch.Generator().manual_seed(size)
    if kind == "all":
        return torch.ones(rows, size, dtype=torch.bool)
    if kind == "one":
        return torch.nn.functional.one_hot(torch.arange(rows) * 7 % size, size).bool()
    fraction = {"few": 0.01, "half": 0.5, "most": 0.99}[kind]
    allowed = torch.rand(rows, size, generator=generator) < fraction
    allowed[:, size // 2] = True
    return allowed


def sample(rows, choices, masks):
    packed = sampling.packed_rows(len(choices))
    for i, (choice, mask) in enumerate(zip(choices, masks, strict=True)):
        address = 0 if mask is None else mask.ctypes.data
        choice.pack(packed, i, [0] * (i + 3), False, address)
    return sampling.sample(rows, packed)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["all", "one", "few", "half", "most"])
def test_only_allowed_tokens_are_sampled(isa, kind, size):
    rows = torch.randn(12, size) * 3
    allowed = masks_of(kind, 12, size)
    words = [bits_of(torch.nonzero(row)[:, 0].tolist(), size) for row in allowed]
    for cut in CUTS:
        choices = [
            sampling.SamplingInputs(seed=i, num_logprobs=min(size, 5), **cut) for i in range(12)
        ]
        got = sample(rows.clone(), choices, words)
        expected = sample(rows.masked_fill(~allowed, float("-inf")), choices, [None] * 12)
        assert got["token"].tolist() == expected["token"].tolist()
        assert all(allowed[i, token] for i, token in enumerate(got["token"].tolist()))
        # log-probabilities are those of the raw logits
        raw = torch.log_softmax(rows.double(), -1)
        for i, token in enumerate(got["token"].tolist()):
            assert got["logprob"][i] == pytest.approx(float(raw[i, token]), abs=1e-4)
            assert got["rank"][i] == 1 + int((rows[i] > rows[i, token]).sum())
            best = torch.topk(rows[i], min(size, 5)).indices.tolist()
            assert got["top_tokens"][i][: len(best)].tolist() == best


def test_rows_without_a_mask_are_as_they_were(isa):
    rows = torch.randn(9, 5000)
    choices = [sampling.SamplingInputs(seed=i, temperature=1.0, top_p=0.9) for i in range(9)]
    alone = sample(rows.clone(), choices, [None] * 9)["token"].tolist()
    mask = bits_of([17], 5000)
    mixed = sample(rows.clone(), choices, [mask if i % 2 else None for i in range(9)])
    assert mixed["token"].tolist() == [17 if i % 2 else token for i, token in enumerate(alone)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_mask_and_broken_logits_give_some_token(isa, temperature):
    """The grammar that made such a mask ends the sequence; here it must give a token of the
    vocabulary without a crash."""
    nothing = np.zeros(32, dtype=np.uint32)
    some = bits_of([5, 900], 1000)
    for rows in (torch.randn(4, 1000), torch.full((4, 1000), float("nan"))):
        choices = [
            sampling.SamplingInputs(seed=i, temperature=temperature, top_p=0.9) for i in range(4)
        ]
        got = sample(rows.clone(), choices, [nothing, some, None, some])
        assert all(0 <= token < 1000 for token in got["token"].tolist())
        assert not np.isnan(got["logprob"]).any()


class Fixed:
    """A constant mask."""

    def __init__(self, token_ids, size):
        self.bits = bits_of(token_ids, size)
        self.address = self.bits.ctypes.data

    def is_needed(self, num_tokens: int) -> bool:
        return True


def test_torch_and_native_agree(isa):
    from serve.runner.sampler import sample

    def sequences():
        found = []
        for i in range(16):
            kwargs = {"temperature": [0.0, 1.0, 0.8][i % 3], "top_k": [0, 5][i % 2], "seed": i}
            sequence = make_seq(3, request_id=str(i), logprobs=2, min_tokens=5, **kwargs)
            sequence.mask = Fixed(range(i, 2000, 13), 2000) if i % 4 else None
            found.append(sequence)
        return found

    rows = torch.randn(16, 2000) * 2
    native, plain = sample(rows.clone(), sequences()), sample_with_torch(rows.clone(), sequences())
    assert native.token_ids == plain.token_ids
    assert all(token % 13 == i % 13 for i, token in enumerate(native.token_ids) if i % 4)
    for one, other in zip(native.logprobs, plain.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
