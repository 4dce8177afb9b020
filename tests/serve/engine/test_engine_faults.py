"""A request that fails or is refused affects no other request."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve import FinishReason
from serve.errors import (
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    RequestError,
)
from tests.support.engine.engine_rig import PROMPT, Rig, go, params


def test_a_failing_request_ends_alone():
    """A step with the poisoned sequence raises; the other sequences lose nothing."""

    def fails(sequence):
        return sequence.request.request_id == "bad" and sequence.num_output_tokens >= 3

    async def main():
        async with Rig(fails=fails) as rig:
            good = [rig.engine.submit(PROMPT, params(max_tokens=40)) for _ in range(6)]
            bad = rig.engine.submit(PROMPT, params(max_tokens=40), request_id="bad")
            bad_deltas = [delta async for delta in bad]
            assert bad_deltas[-1].finish_reason is FinishReason.ERROR
            assert "ZeroDivisionError" in bad_deltas[-1].error
            assert sum(len(d.token_ids) for d in bad_deltas) == 3
            for stream in good:
                deltas = [delta async for delta in stream]
                assert deltas[-1].finish_reason is FinishReason.LENGTH
                tokens = [t for d in deltas for t in d.token_ids]
                expected = [97 + (len(PROMPT) + i) % 26 for i in range(40)]
                assert tokens == expected

    go(main())


def test_a_broken_detokenizer_ends_only_its_sequence(monkeypatch):
    from serve.engine import output_processor as output_module

    original = output_module.OutputState.push

    def push(self, token, logprobs):
        if self.index == 1:
            raise ValueError("broken")
        return original(self, token, logprobs)

    monkeypatch.setattr(output_module.OutputState, "push", push)

    async def main():
        async with Rig() as rig:
            output = await rig.engine.generate(PROMPT, params(n=3))
            assert [o.finish_reason for o in output.outputs] == ["length", "error", "length"]
            assert "ValueError" in output.outputs[1].error

    go(main())


def test_a_fault_while_queueing_ends_only_its_request():
    async def main():
        async with Rig() as rig:
            factory = rig.engine.loaded.core._detokenizers
            original, calls = factory.make, []

            def make(**kwargs):
                calls.append(1)
                if len(calls) == 1:
                    raise ValueError("broken")
                return original(**kwargs)

            factory.make = make
            with pytest.raises(GenerationError):
                await rig.engine.generate(PROMPT, params())
            output = await rig.engine.generate(PROMPT, params())
            assert output.outputs[0].finish_reason == "length"
            assert rig.engine.is_ready

    go(main())


def test_a_broken_sink_affects_no_other_request():
    class BrokenSink:
        def accept(self, request):
            pass

        def push(self, delta):
            raise ValueError("broken sink")

        def fail(self, error):
            pass

        def wake(self):
            raise ValueError("broken sink")

    async def main():
        async with Rig() as rig:
            core = rig.engine.loaded.core
            streams = [rig.engine.submit(PROMPT, params(max_tokens=30)) for _ in range(2)]
            core.submit(PROMPT, params(max_tokens=30), BrokenSink())
            for stream in streams:
                deltas = [delta async for delta in stream]
                assert sum(len(d.token_ids) for d in deltas) == 30
            for _ in range(100):
                if core.num_unfinished() == 0:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the request of the broken sink still runs")

    go(main())


@pytest.mark.timing
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    async def main():
        async with Rig(max_model_len=64) as rig:
            began = time.monotonic()
            with pytest.raises(ContextLengthError, match="at least 1"):
                await rig.engine.submit("x" * 8_000_000, params()).accepted()
            assert time.monotonic() - began < 0.5

    go(main())


def test_a_failed_loop_ends_all_requests_and_refuses_new_ones():
    def explode(plan):
        raise SystemExit("the device is gone")

    async def main():
        async with Rig(before=explode) as rig:
            rig.engine.loaded.core._prompt_pool.submit(lambda: time.sleep(0.02), compiles=False)
            rig.engine.loaded.core._prompt_pool.submit(lambda: time.sleep(0.02), compiles=False)
            # all three are accepted before the first one reaches the device
            streams = [rig.engine.submit(PROMPT, params()) for _ in range(3)]
            for stream in streams:
                deltas = [delta async for delta in stream]
                assert deltas[-1].finish_reason is FinishReason.ERROR
            with pytest.raises(EngineStoppedError):
                rig.engine.submit(PROMPT, params())

    go(main())


def test_refusals_name_the_parameter():
    async def refused(engine, prompt, **kwargs):
        with pytest.raises(RequestError) as caught:
            await engine.submit(prompt, params(**kwargs)).accepted()
        return caught.value

    async def main():
        async with Rig(max_model_len=64) as rig:
            engine = rig.engine
            assert (await refused(engine, [])).param == "prompt"
            for bad in ([-1], [320], [1.5], [True], ["a"], [2**70]):
                assert (await refused(engine, bad)).param == "prompt"
            assert (await refused(engine, [1], logit_bias={320: 1.0})).param == "logit_bias"
            assert (await refused(engine, [1], stop_token_ids=[999])).param == "stop_token_ids"
            too_long = await refused(engine, [1] * 64)
            assert isinstance(too_long, ContextLengthError)
            assert "64 tokens" in str(too_long)
            assert (await refused(engine, [1] * 60)).param == "max_tokens"
            assert (await refused(engine, "lone \ud800 surrogate")).param == "prompt"
            fits = await engine.generate([1] * 60, params(max_tokens=None))
            assert len(fits.outputs[0].token_ids) == 4
            assert engine.stats().num_unfinished == 0

    go(main())
