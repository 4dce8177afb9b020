"""An engine on the CUDA back end on several ranks, with Triton's kernels in the interpreter, gives
the tokens of one rank."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.group.exchange.staged import StagedExchange
from serve.group.rank import Rank
from serve.group.start import make_grid
from serve.loading.model_source import read_source
from serve.models.progress import LoadProgress
from serve.runner.device_step_sampler import DeviceStepSampler
from serve.runner.step_device import HostStepDevice
from tests.support.cuda.interpreted_ranks import one_launch_at_a_time  # noqa: F401
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.profile import every_day
from transport.arena import ExchangeError

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.small_pages,
    pytest.mark.usefixtures("one_launch_at_a_time", "thread_workers"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels must be interpreted"),
]

SETTINGS = {
    "backend": "cuda",
    "max_num_seqs": 3,
    "max_model_len": 48,
    "max_num_batched_tokens": 16,
    "kv_cache_bytes": 4 << 20,
}
PROMPTS = [[5, 9, 17], list(range(20, 29))]


def tokens_of(grid, dtype="int8", family="llama", name="base", **settings):
    """Returns tokens and log-probabilities; the second answer is sampled, with penalties."""
    usual = {"max_tokens": 2, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(temperature=0.0, prompt_logprobs=1, **usual),
        SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, **usual),
    ]
    tensor, stages = grid
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "dtype": dtype}
    with LLM(str(checkpoint(family, name)), **SETTINGS | ranks | settings) as llm:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    return [
        (each.outputs[0].token_ids, each.outputs[0].cumulative_logprob, each.prompt_logprobs)
        for each in found
    ]


@functools.cache
def of_one_rank(dtype, family="llama", name="base"):
    return tokens_of((1, 1), dtype, family, name)


@pytest.mark.parametrize(
    ("grid", "dtype"),
    every_day([0, 1], [((2, 1), "int8"), ((1, 2), "int8"), ((2, 1), "int4"), ((2, 2), "nf4")]),
)
def test_ranks_give_the_tokens_and_bits_of_one(grid, dtype):
    assert tokens_of(grid, dtype) == of_one_rank(dtype)


@pytest.mark.exhaustive
def test_an_exchange_that_fails_is_recovered_from(monkeypatch, thread_workers):  # noqa: F811
    """The rank does not say why, so it counts as lost and another one takes its place."""
    calls, original = itertools.count(), StagedExchange.complete

    def complete(self, buffer, bounds):
        if self.rank == 1 and next(calls) == 12:
            raise ExchangeError("the device is lost")
        original(self, buffer, bounds)

    monkeypatch.setattr(StagedExchange, "complete", complete)
    assert tokens_of((2, 1)) == of_one_rank("int8")
    assert next(calls) > 13
    assert thread_workers[0].num_started == 2


def test_a_rank_measures_and_compiles_alone(monkeypatch):
    """Without the other ranks, whose columns are then zeros."""
    ran = []
    monkeypatch.setattr(HostStepDevice, "peak_bytes", lambda self, work: ran.append(work()) or 0)
    config = EngineConfig(
        model=str(checkpoint("llama", "base")), dtype="int8", **SETTINGS, tensor_parallel_size=2
    )
    source = read_source(config, 0)
    grid = make_grid(source.config, source.spec)
    rank = Rank(source, grid, 1, LoadProgress())
    assert ran == [None] and rank.room.device and rank.exchange is None
    with rank.alone():
        rank.device.warm_up(rank.model, source)
    DeviceStepSampler(source.spec.vocab_size, 2, 2, rank.device.queue).warm_up()
    rank.close()
