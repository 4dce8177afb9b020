"""The three pools together, with a scripted device: streams, stops, aborts, faults, shutdown."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from bench.instant import load_instant
from serve import LLM, Engine, FinishReason, SamplingParams
from serve.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from tests.checkpoints import checkpoint
from tests.fakes import ScriptedRunner

PROMPT = [5, 6, 7]


def text_script(text):
    """A runner script that spells `text` over and over, one byte-token at a time."""

    def script(sequence):
        from serve.tokenizer import Tokenizer

        ids = _ids(text, Tokenizer)
        return ids[sequence.num_output_tokens % len(ids)]

    return script


@functools.cache
def _ids(text, tokenizer_class):
    tokenizer = tokenizer_class.load(checkpoint("llama"))
    return tokenizer.encode(text, add_special_tokens=False)


class Rig:
    """An engine on a ScriptedRunner, and the runner."""

    def __init__(self, num_pages=256, **kwargs):
        settings = {
            k: kwargs.pop(k) for k in list(kwargs) if k.startswith(("max_", "kv_", "memory_"))
        }
        self.runner: ScriptedRunner | None = None

        def make(kv):
            self.runner = ScriptedRunner(kv, **kwargs)
            return self.runner

        load = functools.partial(
            load_instant, make_runner=make, num_pages=num_pages, token_bytes=4096
        )
        self.engine = Engine(
            str(checkpoint("llama")), load=load, **({"max_num_seqs": 8} | settings)
        )

    def sink(self):
        """A sink that nobody reads."""
        return SimpleNamespace(
            accept=lambda request: None,
            push=lambda delta: None,
            fail=lambda error: None,
            wake=lambda: None,
        )

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *exc):
        await self.engine.shutdown()
        core = self.engine.loaded.core
        assert core.num_unfinished() == 0
        assert core.stats().pages_in_use == 0
        assert core.stats().pages_mapped == 0
        assert core._inbox.empty()
        assert core._records.empty()
        assert self.runner.is_closed
        assert not core._compute.is_alive()
        assert not core._post.is_alive()


def go(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def params(**kwargs):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | kwargs))


def test_stream_gives_all_tokens_and_one_end():
    async def main():
        async with Rig(script=text_script("hello world ")) as rig:
            stream = rig.engine.submit(PROMPT, params(max_tokens=30))
            request = await stream.accepted()
            assert list(request.prompt_token_ids) == PROMPT
            deltas = [delta async for delta in stream]
            assert sum(len(d.token_ids) for d in deltas) == 30
            assert [d.finish_reason for d in deltas][-1] is FinishReason.LENGTH
            assert all(d.finish_reason is None for d in deltas[:-1])
            assert "".join(d.text for d in deltas).startswith("hello world hello")
            metrics = stream.metrics
            assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s
            assert metrics.first_token_s <= metrics.finished_s

    go(main())


def test_stop_string_ends_the_sequence_and_frees_it():
    async def main():
        async with Rig(script=text_script("one two three ")) as rig:
            output = await rig.engine.generate(PROMPT, params(max_tokens=200, stop=["thr"]))
            assert output.outputs[0].text == "one two "
            assert output.outputs[0].finish_reason == "stop"
            assert output.outputs[0].stop_reason == "thr"
            included = params(max_tokens=200, stop="thr", include_stop_str_in_output=True)
            output = await rig.engine.generate(PROMPT, included)
            assert output.outputs[0].text == "one two thr"
            for _ in range(100):
                if rig.engine.stats().num_unfinished == 0:
                    break
                await asyncio.sleep(0.01)
            assert rig.engine.stats().pages_in_use == 0

    go(main())


def test_stop_token_text_is_left_out():
    async def main():
        ids = _ids("abcdef", __import__("serve.tokenizer", fromlist=["x"]).Tokenizer)
        async with Rig(script=text_script("abcdef")) as rig:
            given = params(stop_token_ids=[ids[3]])
            output = (await rig.engine.generate(PROMPT, given)).outputs[0]
            assert output.token_ids == ids[:4]
            assert (output.finish_reason, output.stop_reason) == ("stop", ids[3])
            whole = "".join(rig.engine.tokenizer.token_text(i) for i in ids[:3])
            assert output.text == whole

    go(main())


def test_n_outputs_and_max_tokens_zero():
    async def main():
        async with Rig() as rig:
            output = await rig.engine.generate(PROMPT, params(n=3, max_tokens=5))
            assert [len(o.token_ids) for o in output.outputs] == [5, 5, 5]
            empty = await rig.engine.generate(PROMPT, params(max_tokens=0))
            assert (empty.outputs[0].text, empty.outputs[0].finish_reason) == ("", "length")

    go(main())


@pytest.mark.parametrize("when", ["at once", "accepted", "first token", "late"])
def test_abort(when):
    async def main():
        async with Rig(before=lambda plan: time.sleep(0.002)) as rig:
            stream = rig.engine.submit(PROMPT, params(max_tokens=200))
            other = rig.engine.submit(PROMPT, params(max_tokens=20))
            if when != "at once":
                await stream.accepted()
            if when in ("first token", "late"):
                for _ in range(1 if when == "first token" else 10):
                    await anext(stream)
            stream.abort()
            stream.abort()
            last = [delta async for delta in stream][-1]
            assert last.finish_reason is FinishReason.ABORT
            deltas = [delta async for delta in other]
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            await asyncio.sleep(0.02)
            assert rig.engine.stats().num_unfinished == 0
            assert rig.engine.stats().pages_in_use == 0

    go(main())


def test_leaving_the_stream_aborts():
    async def main():
        async with Rig(before=lambda plan: time.sleep(0.001)) as rig:
            stream = rig.engine.stream(PROMPT, params(max_tokens=240))
            async for _ in stream:
                break
            await stream.aclose()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(
                    rig.engine.generate(PROMPT, params(max_tokens=250)), timeout=0.02
                )
            await asyncio.sleep(0.05)
            assert rig.engine.stats().num_unfinished == 0

    go(main())


def test_a_failing_request_ends_alone():
    """The step raises whenever the poisoned sequence is in it: the others do not notice."""

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
    from serve import output as output_module

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


def test_a_broken_sink_harms_no_other():
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


def test_shutdown_does_not_tokenize_the_backlog():
    async def main():
        async with Rig(max_num_waiting=500) as rig:
            core = rig.engine.loaded.core
            for _ in range(40):
                core.submit(lambda: time.sleep(0.2) or PROMPT, params(), rig.sink())
            began = time.monotonic()
            await rig.engine.shutdown()
            assert time.monotonic() - began < 1.5

    go(main())


def test_stop_strings_wait_for_min_tokens():
    async def main():
        async with Rig(script=text_script("a")) as rig:
            for most, text in ((3, "aaa"), (6, "aaa")):
                given = params(min_tokens=3, max_tokens=most, stop=["a"])
                output = (await rig.engine.generate(PROMPT, given)).outputs[0]
                assert output.text == text
            whole = params(min_tokens=3, max_tokens=3, stop=["aa"])
            output = (await rig.engine.generate(PROMPT, whole)).outputs[0]
            assert (output.text, output.finish_reason) == ("aaa", "length")

    go(main())


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    async def main():
        async with Rig(max_model_len=64) as rig:
            began = time.monotonic()
            with pytest.raises(ContextLengthError, match="characters"):
                await rig.engine.submit("x" * 8_000_000, params()).accepted()
            assert time.monotonic() - began < 0.5

    go(main())


def test_a_failed_loop_answers_everybody_and_is_remembered():
    def explode(plan):
        raise SystemExit("the device is gone")

    async def main():
        async with Rig(before=explode) as rig:
            rig.engine.loaded.core._tokenize.submit(time.sleep, 0.02)
            rig.engine.loaded.core._tokenize.submit(time.sleep, 0.02)
            # all three are accepted before the first one reaches the device
            streams = [rig.engine.submit(PROMPT, params()) for _ in range(3)]
            for stream in streams:
                deltas = [delta async for delta in stream]
                assert deltas[-1].finish_reason is FinishReason.ERROR
            with pytest.raises(EngineStoppedError):
                rig.engine.submit(PROMPT, params())

    go(main())


def test_a_stalled_reader_stalls_nobody():
    async def main():
        async with Rig() as rig:
            stalled = rig.engine.submit(PROMPT, params(max_tokens=200))
            output = await rig.engine.generate(PROMPT, params(max_tokens=200))
            assert len(output.outputs[0].token_ids) == 200
            await asyncio.sleep(0.05)
            deltas = [delta async for delta in stalled]
            assert len(deltas) <= 3, "what has gathered comes as one"
            assert sum(len(d.token_ids) for d in deltas) == 200

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


def test_back_pressure():
    async def main():
        async with Rig(
            max_num_waiting=2, max_num_seqs=1, before=lambda plan: time.sleep(0.005)
        ) as rig:
            streams = [rig.engine.submit(PROMPT, params()) for _ in range(3)]
            with pytest.raises(OverloadedError):
                rig.engine.submit(PROMPT, params())
            for stream in streams:
                assert [d async for d in stream][-1].finish_reason is FinishReason.LENGTH
            await rig.engine.generate(PROMPT, params())

    go(main())


def test_shutdown_with_requests_in_flight():
    async def main():
        rig = Rig(before=lambda plan: time.sleep(0.002))
        async with rig:
            streams = [rig.engine.submit(PROMPT, params(max_tokens=200)) for _ in range(12)]
            await anext(streams[0])
            await rig.engine.shutdown(drain_s=0)
            for stream in streams:
                assert [d async for d in stream][-1].finish_reason is FinishReason.ABORT
            with pytest.raises(EngineStoppedError):
                rig.engine.submit(PROMPT, params())

    go(main())


def test_a_cancelled_start_leaves_nothing_behind():
    cores = []

    def load(config, *, progress):
        time.sleep(0.1)
        loaded = load_instant(config, progress=progress)
        cores.append(loaded.core)
        return loaded

    async def main():
        engine = Engine(str(checkpoint("llama")), load=load, max_num_seqs=4)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.start(), 0.03)
        for _ in range(200):
            await asyncio.sleep(0.01)
            if cores and not cores[0]._compute.is_alive():
                return
        raise AssertionError("the loaded core still lives")

    go(main())


def test_drain_lets_running_requests_finish():
    async def main():
        async with Rig(before=lambda plan: time.sleep(0.001)) as rig:
            stream = rig.engine.submit(PROMPT, params(max_tokens=50))
            await anext(stream)
            await rig.engine.shutdown(drain_s=5)
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is FinishReason.LENGTH

    go(main())


def test_two_engines_in_one_process():
    async def main():
        async with (
            Rig(script=text_script("first ")) as one,
            Rig(script=text_script("second ")) as two,
        ):
            outputs = await asyncio.gather(
                *(rig.engine.generate(PROMPT, params(max_tokens=60)) for rig in (one, two) * 5)
            )
            texts = {o.outputs[0].text.split()[0] for o in outputs}
            assert texts == {"first", "second"}

    go(main())


def test_many_random_requests_leave_nothing_behind():
    import random

    rng = random.Random(5)

    async def one(engine):
        await asyncio.sleep(rng.random() * 0.1)
        stream = engine.submit(
            [rng.randrange(2, 300) for _ in range(rng.randint(1, 60))],
            params(
                max_tokens=rng.randint(1, 60),
                n=rng.randint(1, 3),
                stop=["ab"] if rng.random() < 0.3 else None,
            ),
        )
        leave_after = rng.randint(1, 40) if rng.random() < 0.3 else None
        count = 0
        async for _ in stream:
            count += 1
            if count == leave_after:
                stream.abort()

    async def main():
        async with Rig(num_pages=40, max_num_seqs=6, script=text_script("abracadabra ")) as rig:
            await asyncio.gather(*(one(rig.engine) for _ in range(150)))
            rig.engine.loaded.core._kv.check_integrity()

    go(main())


def test_idle_engine_gives_memory_back():
    async def main():
        async with Rig() as rig:
            await rig.engine.generate(PROMPT, params())
            assert rig.engine.stats().pages_mapped > 0
            for _ in range(100):
                await asyncio.sleep(0.02)
                if rig.engine.stats().pages_mapped == 0:
                    return
            raise AssertionError("still mapped")

    go(main())


def test_llm_prompts_params_and_errors(capfd):
    with LLM(str(checkpoint("llama")), dtype="float32") as llm:
        outputs = llm.generate(
            ["hello", {"prompt_token_ids": PROMPT}, PROMPT],
            [params(max_tokens=n) for n in (1, 2, 3)],
            use_tqdm=False,
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
        assert outputs[0].prompt == "hello"
        assert outputs[1].prompt_token_ids == PROMPT
        assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids[:2]
        assert llm.generate("hi", params(), use_tqdm=False)[0].prompt == "hi"
        with pytest.raises(RequestError, match="2 sampling_params for 1"):
            llm.generate("hi", [params()] * 2, use_tqdm=False)
        with pytest.raises(ContextLengthError):
            llm.generate(["fine", [5] * 5000], params(), use_tqdm=False)
        chat = llm.chat([{"role": "user", "content": "hi"}], params())
        assert len(chat) == 1
        assert capfd.readouterr() == ("", "")  # the bar is for terminals
        assert llm.stats().num_unfinished == 0


def test_llm_seeded_requests_repeat_in_any_batch():
    sampled = SamplingParams(temperature=1.0, seed=11, max_tokens=20, top_p=0.95)
    with LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=8) as llm:
        alone = llm.generate([PROMPT], sampled, use_tqdm=False)[0].outputs[0].token_ids
        noise = SamplingParams(temperature=1.0, max_tokens=30)
        mixed = llm.generate(
            [[9, 8], PROMPT, [4] * 30, PROMPT], [noise, sampled, noise, sampled], use_tqdm=False
        )
        assert mixed[1].outputs[0].token_ids == alone
        assert mixed[3].outputs[0].token_ids == alone
        several = llm.generate([PROMPT], SamplingParams(n=4, seed=11, max_tokens=20, top_p=0.95))
        texts = [tuple(o.token_ids) for o in several[0].outputs]
        assert texts[0] == tuple(alone)
        assert len(set(texts)) == 4


def test_two_models_in_one_process():
    """Two real engines at once, each with its own memory and model."""
    with (
        LLM(str(checkpoint("llama")), dtype="float32") as one,
        LLM(str(checkpoint("gpt2")), dtype="float32") as two,
    ):
        alone = [llm.generate(PROMPT, params(), use_tqdm=False)[0] for llm in (one, two)]
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(llm.generate, [PROMPT] * 8, params(), use_tqdm=False)
                for llm in (one, two)
            ]
            together = [job.result() for job in jobs]
    for single, several in zip(alone, together, strict=True):
        for output in several:
            assert output.outputs[0].token_ids == single.outputs[0].token_ids


def test_a_forgotten_llm_is_collected():
    llm = LLM(str(checkpoint("llama")), dtype="float32")
    core = llm._loaded.core
    llm.generate(PROMPT, params(), use_tqdm=False)
    del llm
    gc.collect()
    for _ in range(100):
        if not core._compute.is_alive():
            return
        time.sleep(0.02)
    raise AssertionError("threads still run")


def test_lengths_are_learned_per_client_and_told_in_the_stats():
    """A client's name reaches the predictor; prompts and lengths become calibration."""

    async def main():
        script = text_script("abcdef")
        async with Rig(num_pages=64, script=script) as rig:
            wanted = params(max_tokens=250, ignore_eos=False, stop="f")
            for _ in range(60):
                stream = rig.engine.submit(PROMPT, wanted, client="an app")
                await rig.engine.collect(stream)
            policy = rig.engine.loaded.core._scheduler.policy
            assert ("an app", -1) in policy.predictor._histories
            while (stats := rig.engine.stats()).num_unfinished:
                await asyncio.sleep(0.005)  # a stop string ends the last one a moment later
            assert stats.num_finished == 60
            assert stats.preemptions_per_1000 == 0
            assert 0 < stats.memory_utilisation < 0.1
            assert stats.coverage_p90 is not None and stats.coverage_p90 > 0.9

    go(main())


@pytest.mark.parametrize("policy", ["predicted", "worst_case", "prompt_only"])
def test_memory_policies_by_name(policy):
    async def main():
        async with Rig(num_pages=80, memory_policy=policy) as rig:
            outputs = await asyncio.gather(
                *(rig.engine.generate(PROMPT, params(max_tokens=20)) for _ in range(12))
            )
            assert all(len(o.outputs[0].token_ids) == 20 for o in outputs)
            stats = rig.engine.stats()
            assert stats.num_finished == 12
            assert (stats.coverage_p50 is None) == (stats.coverage_p90 is None)

    go(main())


def test_an_unknown_memory_policy_is_refused():
    with pytest.raises(ConfigError, match="memory_policy must be one of predicted"):
        Rig(memory_policy="hope")
