"""An engine on the CUDA back end on several ranks, with Triton's kernels in the interpreter, gives
the tokens of one rank."""

from __future__ import annotations

import functools
import itertools
import threading
import time

import pytest
import torch

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.group.exchange import direct
from serve.group.exchange.cuda import CudaExchange
from serve.group.exchange.direct import DirectExchange
from serve.group.exchange.staged import StagedExchange
from serve.group.rank import Rank
from serve.group.sizes import BARRIER_DEADLINE_S
from serve.group.start import make_grid
from serve.loading.cuda_rank import RankDevice
from serve.loading.model_source import read_source
from serve.models.progress import LoadProgress
from serve.runner.device_step_sampler import DeviceStepSampler
from serve.runner.step_device import HostStepDevice
from tests.support.cuda.interpreted_ranks import one_launch_at_a_time  # noqa: F401
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
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


def tokens_of(
    grid, dtype="int8", family="llama", name="base", prompts=PROMPTS, max_tokens=2, **settings
):
    """Returns tokens and log-probabilities; the second answer is sampled, with penalties."""
    usual = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(temperature=0.0, prompt_logprobs=1, **usual),
        SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, **usual),
    ][: len(prompts)]
    tensor, stages = grid
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "dtype": dtype}
    with LLM(str(checkpoint(family, name)), **SETTINGS | ranks | settings) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    return [
        (each.outputs[0].token_ids, each.outputs[0].cumulative_logprob, each.prompt_logprobs)
        for each in found
    ]


@functools.cache
def of_one_rank(dtype, family="llama", name="base"):
    return tokens_of((1, 1), dtype, family, name)


@pytest.fixture
def own_devices(monkeypatch):
    """Gives each rank a device of its own, as the engine sees it; returns the names."""
    names, measure = set(), RankDevice.measure

    def measured(self, model):
        names.add(threading.current_thread().name)
        return threading.current_thread().name, *measure(self, model)[1:]

    monkeypatch.setattr(RankDevice, "measure", measured)
    return names


@pytest.mark.exhaustive
def test_devices_that_exchange_give_the_tokens_of_one_rank(own_devices, caplog):
    """Gloo stands for NCCL."""
    caplog.set_level("INFO")
    shorter = {"prompts": PROMPTS[:1], "max_tokens": 1}
    together = tokens_of((2, 1), **shorter)
    assert "stage 0: its tensor ranks exchange between their devices" in caplog.text
    assert not [x for x in caplog.records if x.name == direct.__name__], "it has fallen back"
    assert len(own_devices) == 2
    assert together == tokens_of((1, 1), **shorter)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("grid", "dtype"), [((2, 1), "int8"), ((1, 2), "int8"), ((2, 1), "int4"), ((2, 2), "nf4")]
)
def test_ranks_give_the_tokens_and_bits_of_one(grid, dtype):
    assert tokens_of(grid, dtype) == of_one_rank(dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("grid", "dtype"), [((2, 1), "int8"), ((2, 2), "int4")])
def test_devices_of_several_stages_exchange(own_devices, grid, dtype):
    assert tokens_of(grid, dtype) == of_one_rank(dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name"), [("deepseek_v3", "yarn"), ("mixtral", "base")])
def test_latents_and_experts_are_divided(family, name):
    """Latent attention by heads, and a mixture of experts."""
    assert tokens_of((2, 1), "int8", family, name) == of_one_rank("int8", family, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("exchange", "call"), [(StagedExchange, 12), (CudaExchange, 14)])
def test_an_exchange_that_fails_is_recovered_from(monkeypatch, request, exchange, call):
    """The rank does not say why, so it counts as lost and another one takes its place."""
    workers = request.getfixturevalue("thread_workers")
    if exchange is CudaExchange:
        request.getfixturevalue("own_devices")
    calls, original = itertools.count(), exchange.complete

    def complete(self, buffer, bounds):
        if self.rank == 1 and next(calls) == call:
            raise ExchangeError("the device is lost")
        original(self, buffer, bounds)

    monkeypatch.setattr(exchange, "complete", complete)
    began_s = time.monotonic()
    assert tokens_of((2, 1)) == of_one_rank("int8")
    assert next(calls) > call + 1
    assert workers[0].num_started == 2
    assert time.monotonic() - began_s < BARRIER_DEADLINE_S, "the others have waited for it"


@pytest.mark.exhaustive
def test_a_step_that_fails_is_computed_again(monkeypatch, own_devices, thread_workers):  # noqa: F811
    """The devices exchange in a new group; no rank is started."""
    calls, forward, opened = itertools.count(), Rank.forward, []

    def failing(self, *arguments):
        if self.number == 1 and next(calls) == 1:
            raise RuntimeError("injected")
        return forward(self, *arguments)

    make = DirectExchange._make_group
    monkeypatch.setattr(Rank, "forward", failing)
    monkeypatch.setattr(
        DirectExchange, "_make_group", lambda self: opened.append(self.rank) or make(self)
    )
    assert tokens_of((2, 1)) == of_one_rank("int8")
    assert sorted(opened) == [0, 0, 1, 1]
    assert thread_workers[0].num_started == 1


@pytest.mark.exhaustive
def test_a_rank_measures_and_compiles_alone(monkeypatch):
    """Without the other ranks, whose columns are then zeros."""
    ran = []
    monkeypatch.setattr(HostStepDevice, "peak_bytes", lambda self, work: ran.append(work()) or 0)
    config = EngineConfig(
        model=str(checkpoint("llama", "base")), dtype="int8", **SETTINGS, tensor_parallel_size=2
    )
    source = read_source(config, 0)
    grid = make_grid(source)
    rank = Rank(source, grid, 1, LoadProgress())
    assert ran == [None] and rank.room.device and rank.exchange is None
    with rank.alone():
        rank.device.warm_up(rank.model, source)
    DeviceStepSampler(source.spec.vocab_size, 2, 2, rank.device.queue).warm_up()
    rank.close()
