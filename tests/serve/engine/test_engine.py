"""The three pools on a scripted device: streams, stops, aborts and shutdown."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from contextlib import suppress
from typing import get_type_hints

import pytest

from bench.common.instant import load_instant
from serve import Engine, FinishReason
from serve.config import EngineConfig, EngineSettings
from serve.errors import (
    ContextLengthError,
    EngineStoppedError,
    OverloadedError,
    RequestError,
)
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.engine_rig import PROMPT, Rig, _ids, go, params, text_script


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


def test_large_texts_take_a_thread_of_their_own(monkeypatch):
    """What the caller has tokenized does not count, and is not touched."""
    routed, ids = [], [5] * 100_000

    async def main():
        async with Rig() as rig:
            pool = rig.engine.loaded.core._prompt_pool
            submit = pool.submit

            def noted(job, **how):
                routed.append(how["is_large"])
                submit(job, **how)

            monkeypatch.setattr(pool, "submit", noted)
            text = "a" * 200_000
            for prompt in (
                "a",
                text,
                {"prompt": text, "truncate_prompt_tokens": 3},
                {"prompt_token_ids": ids, "prompt": text},
            ):
                with suppress(RequestError):
                    await rig.engine.generate(prompt, params(max_tokens=1))

    go(main())
    assert routed == [False, True, True, False]
    assert len(ids) == 100_000


def test_the_tokens_of_a_long_prompt_that_is_refused_are_freed_in_pieces(monkeypatch):
    monkeypatch.setattr("serve.engine.preprocessor.LARGE_CHARS", 100)
    monkeypatch.setattr("serve.engine.preprocessor.FREED_AT_ONCE", 100)
    ids = [5] * 50_000

    async def main():
        async with Rig() as rig:
            tokenizer = rig.engine.tokenizer
            monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens: ids)
            with pytest.raises(ContextLengthError):
                await rig.engine.generate("a" * 200, params(max_tokens=1))

    go(main())
    assert ids == []


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
        ids = _ids("abcdef", __import__("serve.text.tokenizer", fromlist=["x"]).Tokenizer)
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


@pytest.mark.timing
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


def test_a_stalled_reader_does_not_stall_other_requests():
    async def main():
        async with Rig() as rig:
            stalled = rig.engine.submit(PROMPT, params(max_tokens=200))
            output = await rig.engine.generate(PROMPT, params(max_tokens=200))
            assert len(output.outputs[0].token_ids) == 200
            await asyncio.sleep(0.05)
            deltas = [delta async for delta in stalled]
            assert len(deltas) <= 3, "gathered tokens come as one delta"
            assert sum(len(d.token_ids) for d in deltas) == 200

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
        rig = Rig(before=lambda plan: time.sleep(0.02))
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
            rig.engine.loaded.core.kv.check_integrity()

    go(main())


def test_an_idle_engine_frees_memory():
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


def test_a_trace_keeps_the_last_steps():
    async def main():
        async with Rig(script=text_script("hello world ")) as rig:
            trace = rig.engine.trace_steps(3)
            await rig.engine.generate(PROMPT, params(max_tokens=10))
            assert len(trace.steps) == 3 and trace.num_lost >= 7
            rig.engine.trace_steps(0)
            before = list(trace.steps), trace.num_lost
            await rig.engine.generate(PROMPT, params(max_tokens=10))
            assert (list(trace.steps), trace.num_lost) == before

    go(main())


def test_a_finished_stream_is_freed_without_the_garbage_collector():
    """Collecting a thousand requests in reference cycles would pause all threads."""

    async def check():
        async with Rig() as rig:
            stream = rig.engine.submit(PROMPT, params())
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is not None
            gone = weakref.ref(stream)
            del stream
            assert gone() is None

    gc.disable()
    try:
        go(check())
    finally:
        gc.enable()


def test_the_typed_settings_are_the_fields_of_the_configuration():
    config, settings = get_type_hints(EngineConfig), get_type_hints(EngineSettings)
    assert config.pop("model") is str
    assert settings == config
