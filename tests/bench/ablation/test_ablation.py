"""The ablation turns optimisations off, and the answers stay the same."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial

import pytest

from bench.ablation.parts import PrefillFirst, StaticBatches, serial_core, with_scripted_ends
from bench.ablation.variants import OURS, SHORT, all_variants, chosen
from bench.cli import ablation as command
from bench.cli.ablation import ablation
from bench.common.plot_style import require_matplotlib
from ops.cpu import native_library
from serve import Engine, FinishReason, SamplingParams
from serve.engine.core import EngineCore
from serve.engine.loader import Parts, load_engine
from serve.errors import ConfigError
from serve.scheduler.step_plan import SchedulerLimits
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.engine_rig import go
from tests.support.engine.fakes import make_kv, make_seq

VARIANTS = [variant.name for variant in all_variants("bfloat16", ends_early=True)]


def scheduler_of(kind, budget=8, max_num_seqs=8):
    kv, _ = make_kv(num_pages=64)
    return kind(SchedulerLimits(max_num_seqs, budget, budget), kv)


def step(scheduler):
    plan = scheduler.schedule(0.0)
    scheduler.kv.commit()
    scheduler.update(plan, [7] * sum(plan.samples))
    return [(s.request.request_id, n) for s, n in zip(plan.sequences, plan.num_rows, strict=True)]


def test_prompts_first_have_the_whole_step_and_keep_others_waiting():
    scheduler = scheduler_of(PrefillFirst)
    scheduler.add(make_seq(3, request_id="a", num_tokens=3))
    assert step(scheduler) == [("a", 3)]
    scheduler.add(make_seq(9, request_id="b"))
    assert step(scheduler) == [("b", 8)]
    assert step(scheduler) == [("b", 1)], "the rest of a prompt, not a decode row"
    assert step(scheduler) == [("a", 1), ("b", 1)]
    assert scheduler.limits.max_num_batched_tokens == 8


def test_no_sequence_joins_a_static_batch_that_decodes():
    scheduler = scheduler_of(StaticBatches)
    scheduler.add(make_seq(6, request_id="a", num_tokens=2))
    scheduler.add(make_seq(6, request_id="b", num_tokens=3))
    assert step(scheduler) == [("a", 6), ("b", 2)]
    assert step(scheduler) == [("b", 4)], "no sequence decodes before all prompts are computed"
    scheduler.add(make_seq(2, request_id="c", num_tokens=2))
    assert step(scheduler) == [("c", 2)], "it has not begun to decode"
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]
    scheduler.add(make_seq(2, request_id="d", num_tokens=2))
    assert step(scheduler) == [("b", 1)], "a and c have ended, d waits all the same"
    assert step(scheduler) == [("d", 2)]
    assert scheduler.limits.max_num_seqs == 8


class Threads:
    """A sink that notes the calling threads and the tokens."""

    def __init__(self):
        self.names, self.tokens, self.ended = set(), [], threading.Event()

    def accept(self, request):
        self.names.add(threading.current_thread().name)

    def push(self, delta):
        self.names.add(threading.current_thread().name)
        self.tokens += delta.token_ids
        if delta.finish_reason is not None:
            self.reason = delta.finish_reason
            self.ended.set()

    def fail(self, error):
        raise AssertionError(error)

    def wake(self):
        self.names.add(threading.current_thread().name)


@pytest.mark.parametrize("core", [EngineCore, serial_core])
def test_a_serial_core_does_everything_in_the_loops_thread(core):
    """Tokenizing and detokenizing run in the steps' thread, and no token is lost at the end."""

    def prompt():
        sink.names.add(threading.current_thread().name)
        return [5, 6, 7]

    async def ask():
        load = partial(load_engine, parts=Parts(core=core))
        async with Engine(checkpoint("llama"), load=load) as engine:
            submit = engine.loaded.core.submit
            submit(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), sink)
            assert await asyncio.to_thread(sink.ended.wait, 10)
            submit(prompt, SamplingParams(max_tokens=200, ignore_eos=True), left)

    sink, left = Threads(), Threads()
    go(ask())
    assert left.reason is FinishReason.ABORT and len(sink.tokens) == 9
    names = {name.rstrip("_0123456789") for name in sink.names}
    if core is EngineCore:
        assert names == {"mergestep-tokenize", "mergestep-output"}
    else:
        assert names == {"mergestep-compute"}


def test_scripted_answers_end_at_their_length_and_not_before():
    prompts = {(5, 6, 7): 9, (8, 9): 4}
    whole = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    ending = SamplingParams(max_tokens=30, temperature=0)

    async def answers(load, params):
        async with Engine(checkpoint("llama"), load=load, max_num_seqs=2) as engine:
            results = await asyncio.gather(
                *(engine.generate(list(prompt), params) for prompt in prompts)
            )
        return [result.outputs[0] for result in results]

    plain = asyncio.run(answers(load_engine, whole))
    parts = with_scripted_ends(Parts(), prompts)
    scripted = asyncio.run(answers(partial(load_engine, parts=parts), ending))
    for long, short, length in zip(plain, scripted, prompts.values(), strict=True):
        assert short.finish_reason == FinishReason.STOP.value
        assert list(short.token_ids) == list(long.token_ids)[:length]


@pytest.mark.timing
@pytest.mark.skipif(not native_library.is_available(), reason="needs int8 products")
def test_ablation_of_the_embedded_model(tmp_path, capsys):
    """With each optimisation off, tokens are equal wherever the arithmetic is."""
    file, png = tmp_path / "ablation.json", tmp_path / "ablation.png"
    has_png = _has_matplotlib()
    result = ablation(
        requests=24,
        rounds=1,
        qps=400.0,
        max_num_seqs=16,
        json_file=file,
        png_file=png if has_png else None,
    )
    rows = {row["name"]: row for row in result["variants"]}
    assert len(rows) == len(VARIANTS)
    for row in rows.values():
        assert row["requests_per_s"][0] > 0 and row["gain"][0] > 0
        assert row["same_tokens"] == 1.0 or not row["is_exact"], row["name"]
        assert (row["ttft_ms"]["n"] == 0) == (row["against"] == SHORT or row["name"] == SHORT)
    reserved = rows["max_tokens reserved"]
    assert reserved["running_mean"] < rows[SHORT]["running_mean"] < 16
    assert rows[OURS]["steps"] < rows["static batches"]["steps"]
    device = result["own_device"]
    assert min(device["pools_s"] + device["serial_s"]) > device["device_s"]
    text = capsys.readouterr().out
    assert "dynamic batching" in text and "+200 %" in text
    written = json.loads(file.read_text())
    assert written["head"]["what"].startswith("ablation") and len(written["variants"]) == len(rows)
    assert not has_png or png.read_bytes().startswith(b"\x89PNG")


def _has_matplotlib():
    try:
        require_matplotlib()
    except ConfigError:
        return False
    return True


def test_exact_answers_need_no_prediction():
    """If every answer has max_tokens, reserving them is not worse and is left out."""
    names = [variant.name for variant in all_variants(None, ends_early=False)]
    assert "max_tokens reserved" not in names and "prompt only" in names
    assert not any("bfloat16" in name for name in names)
    picked = chosen(all_variants(None, ends_early=True), ["prompt only"])
    assert [variant.name for variant in picked] == [OURS, SHORT, "prompt only"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"variants": ["nothing"]}, "nothing"),
        ({"requests": -1}, "requests"),
        ({"qps": 0.0}, "qps"),
        ({"rounds": -1}, "rounds"),
        ({"output_len": 0}, "output_len"),
        ({"input_len": 5000}, "input_len"),
    ],
)
def test_what_cannot_be_run_is_refused_before(options, named):
    with pytest.raises(ConfigError, match=named):
        ablation(**options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keeps", [True, False])
def test_requests_of_a_data_set_are_taken_as_they_are(keeps, monkeypatch, tmp_path):
    """Engines stay loaded, or are loaded when their turn comes."""
    monkeypatch.setattr(command, "_have_room", lambda model, count: keeps)
    asked = tmp_path / "asked.jsonl"
    lines = [{"token_ids": [5, 6, 7 + i], "output_len": 4} for i in range(6)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = ablation(
        str(checkpoint("llama")),
        dataset=f"jsonl:{asked}",
        requests=6,
        rounds=1,
        qps=500.0,
        max_num_seqs=4,
        at_rate=keeps,
        variants=["prompts first"],
    )
    assert [row["name"] for row in result["variants"]] == [OURS, "prompts first"]
    assert all(row["same_tokens"] == 1.0 for row in result["variants"])
    assert result["tokens_per_request"] == 7.0 and result["own_device"] is None
    assert all((row["ttft_ms"]["n"] == 0) is not keeps for row in result["variants"])
