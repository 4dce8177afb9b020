"""An engine on a late device gives the same answers, keeps the device busy and ends cleanly."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from types import SimpleNamespace

import pytest

from bench.common.instant import load_instant
from serve import Engine, SamplingParams
from serve.engine.core import EngineCore
from serve.engine.overlapped_executor import OverlappedExecutor
from serve.engine.pools import ComputeThread
from serve.errors import EngineStoppedError
from serve.request import FinishReason
from serve.scheduler.step_plan import SchedulerLimits
from serve.text.tokenizer import Tokenizer
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_runner import LateRunner
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.engine_rig import go
from tests.support.engine.overlap_rig import Bench, SynchronousRunner

NUM_TOKENS = 60  # so few ids that stop strings occur
PIPELINE = {"depth": 4, "tokens_on_device": False}
KINDS = pytest.mark.parametrize("kind", [{}, PIPELINE], ids=["device", "pipeline"])


class Rig:
    """An engine on a device in a thread whose steps take `seconds`."""

    def __init__(self, seconds=0.001, *, overlaps=True, **settings):
        self.device = LateDevice(seconds, thread=True)
        self.overlaps = overlaps
        load = functools.partial(
            load_instant,
            make_runner=functools.partial(self._make, settings),
            num_pages=256,
            token_bytes=4096,
        )
        self.engine = Engine(str(checkpoint("llama")), load=load, max_num_seqs=8)

    def _make(self, settings, kv):
        self.runner = LateRunner(kv, self.device, num_tokens=NUM_TOKENS, **settings)
        return self.runner if self.overlaps else SynchronousRunner(self.runner)

    async def __aenter__(self):
        await self.engine.start()
        self.core = self.engine.loaded.core
        assert isinstance(self.core._executor, OverlappedExecutor) == self.overlaps
        return self

    async def __aexit__(self, *exc):
        await self.engine.shutdown()
        assert not self.device.faults, self.device.faults[:3]
        assert self.runner.is_closed and self.device.is_idle
        assert self.core.num_unfinished() == 0
        assert self.core.stats().pages_in_use == 0
        assert self.core.stats().pages_mapped == 0
        assert not self.core._compute.is_alive()


def settings(rng):
    stop = rng.choice([[], [], ["a"], ["1", "zz"]])
    ends = rng.choice([[], [rng.randrange(3, NUM_TOKENS)]])
    return SamplingParams(
        max_tokens=rng.choice([1, 3, 20, 40]),
        min_tokens=rng.choice([0, 0, 1]),
        temperature=0.0,
        seed=1,
        n=rng.choice([1, 1, 2]),
        stop=stop,
        stop_token_ids=ends,
        ignore_eos=True,
        logprobs=rng.choice([None, 0]),
    )


async def answers(rig):
    rng = random.Random(7)
    requests = [
        ([rng.randrange(3, 90) for _ in range(rng.choice([1, 4, 30]))], settings(rng))
        for _ in range(40)
    ]
    outputs = await asyncio.gather(
        *(rig.engine.generate(prompt, params) for prompt, params in requests)
    )
    for output in outputs:
        for one in output.outputs:
            assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
    return [
        [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


@KINDS
def test_answers_are_those_of_an_engine_that_does_not_overlap(kind):
    async def main():
        results = []
        for overlaps in (True, False):
            async with Rig(0.0, overlaps=overlaps, **kind) as rig:
                results.append(await answers(rig))
                assert bool(rig.runner.num_pending) == (overlaps and not kind)
        assert results[0] == results[1]
        reasons = {one[2:] for output in results[0] for one in output}
        assert len(reasons) > 4, "stop strings, stop tokens and lengths occur"

    go(main())


def test_the_next_step_is_launched_before_the_previous_one_has_ended():
    async def main():
        async with Rig(0.01) as rig:
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            await asyncio.gather(*(rig.engine.generate([3, i], params) for i in range(4)))
            events = rig.device.events
            index_of = {event: i for i, event in enumerate(events)}
            num_steps = rig.device.num_launched
            in_time = sum(
                index_of["launch", number + 1] < index_of["end", number]
                for number in range(num_steps - 1)
            )
            assert in_time >= num_steps - 6, f"{in_time} of {num_steps}"

    go(main())


@KINDS
def test_aborts_at_any_time(kind):
    async def main():
        async with Rig(0.002, **kind) as rig:
            rng = random.Random(3)
            params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)

            async def one(number):
                stream = rig.engine.submit([3, number], params)
                await asyncio.sleep(rng.random() * 0.05)
                stream.abort()
                return [delta async for delta in stream][-1].finish_reason

            reasons = await asyncio.gather(*(one(number) for number in range(20)))
            assert set(reasons) == {FinishReason.ABORT}
            await _until(lambda: rig.core.num_unfinished() == 0)
            output = await rig.engine.generate([3, 4], SamplingParams(max_tokens=5))
            assert len(output.outputs[0].token_ids) == 5

    go(main())


async def _until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it takes too long")


@KINDS
@pytest.mark.parametrize("fails", ["fails_launch", "fails_wait"])
def test_one_request_fails_and_the_others_go_on(fails, kind):
    async def main():
        def is_bad(sequence):
            return sequence.request.prompt_token_ids[0] == 66 and sequence.num_output_tokens >= 4

        async with Rig(**{fails: is_bad}, **kind) as rig:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            prompts = [[66 if i == 3 else 3 + i, 4] for i in range(8)]
            outputs = await asyncio.gather(
                *(rig.engine.generate(prompt, params) for prompt in prompts)
            )
            bad = outputs[3].outputs[0]
            assert (bad.finish_reason, len(bad.token_ids)) == ("error", 4)
            good = [outputs[i].outputs[0].token_ids for i in range(8) if i != 3]
            assert [len(tokens) for tokens in good] == [12] * 7
            assert rig.engine.stats().num_finished == 8

    go(main())


@KINDS
def test_shutdown_with_a_step_in_flight(kind):
    async def main():
        async with Rig(0.05, **kind) as rig:
            params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
            streams = [rig.engine.submit([3, i], params) for i in range(3)]
            for stream in streams:
                await anext(stream)
            assert rig.runner.in_flight
        for stream in streams:
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is FinishReason.ABORT

    go(main())


@KINDS
def test_a_loop_that_fails_waits_for_its_step(kind):
    async def main():
        async with Rig(0.02, **kind) as rig:
            params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
            stream = rig.engine.submit([3, 4], params)
            await anext(stream)
            others = [rig.engine.submit([3, i], params) for i in range(4)]
            for other in others:
                await anext(other)
            rig.core._scheduler.schedule = None
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert rig.core.has_failed
            assert len(rig.runner.in_flight) >= (2 if kind else 1)
            with pytest.raises(EngineStoppedError):
                await rig.engine.generate([3], params)

    go(main())


class SteppedCore:
    """An EngineCore that a test steps by hand, on Bench's scheduler and device."""

    def __init__(self, **settings):
        self.bench = Bench(**settings)
        self.core = EngineCore(
            runner=self.bench.runner,
            scheduler=self.bench.scheduler,
            kv=self.bench.kv,
            tokenizer=Tokenizer.load(checkpoint("llama")),
            eos_token_ids=frozenset(),
            limits=SimpleNamespace(
                ttft_slo_s=None, vocab_size=320, bounded_json=True, reasoning=None
            ),
            compute=ComputeThread(),
            clock=time.monotonic,
        )

    def __enter__(self):
        return self.core, self.bench

    def __exit__(self, *_):
        self.core._compute.stop()


def test_idle_memory_is_freed_when_no_step_is_in_flight():
    with SteppedCore() as (core, bench):
        sequence = bench.add(num_tokens=20)
        core._step()
        core._step()
        bench.scheduler.finish(sequence, FinishReason.ABORT)
        assert bench.runner.in_flight
        core._inbox.put(bench.kv.trim)
        core._inbox.put(None)
        assert not core._handle_messages()
        assert not bench.runner.in_flight
        bench.check_rest()
        assert core.stats().pages_mapped == 0


def test_an_empty_schedule_waits_only_for_the_step_in_flight():
    with SteppedCore() as (core, bench):
        sequence = bench.add(num_tokens=1)
        core._step()
        assert bench.runner.in_flight and not sequence.is_finished
        core._step()
        assert sequence.is_finished
        bench.check_rest()


def test_an_empty_schedule_waits_only_for_the_oldest_step_of_a_pipeline():
    with SteppedCore(limits=SchedulerLimits(4, 5, 5), **PIPELINE) as (core, bench):
        one, other = bench.add("one", num_tokens=1), bench.add("other", num_tokens=1)
        core._step()
        core._step()
        assert len(bench.runner.in_flight) == 2
        core._step()
        assert one.is_finished and not other.is_finished
        core._step()
        assert other.is_finished
        bench.check_rest()
