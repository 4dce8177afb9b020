"""Engines that drop K/V, token for token beside a reference, and beside themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random

import pytest

from serve import LLM, Engine, SamplingParams
from serve.cli.start_summary import engine_lines
from serve.config import EngineConfig
from serve.engine.core_view import any_request
from serve.errors import ConfigError
from serve.eviction.start import check_eviction
from serve.models import read_spec
from serve.sampling_params import AnswerSoFar
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.evicting_reference import EvictingLlama
from tests.support.preempted import until_preempted

pytestmark = pytest.mark.small_pages
POLICIES = ("window", "h2o", "snapkv", "keyformer", "pyramid")
SETTINGS = {"kv_page_bytes": 4096, "max_num_seqs": 8, "seed": 3}
ROOMY = {"kv_cache_bytes": 8 << 20}


def prompts(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(5, 300) for _ in range(n)] for n in lengths]


def greedy(num_tokens=80, **settings):
    chosen = {"temperature": 0.0, "ignore_eos": True, "seed": 5, "max_tokens": num_tokens}
    return SamplingParams(**(chosen | settings))


def engine(policy, **settings):
    given = {"dtype": "float32", "kv_dtype": "int8", "kv_policy": policy}
    return LLM(str(checkpoint("llama")), **(given | SETTINGS | ROOMY | settings))


def tokens_of(outputs):
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def generate(llm, asked, params=None):
    inputs = [{"prompt_token_ids": ids} for ids in asked]
    return tokens_of(llm.generate(inputs, params or greedy(), use_tqdm=False))


@functools.cache
def alone(policy, **settings):
    """Returns the answers of four requests, one after the other, without a prefix cache."""
    with engine(policy, prefix_cache=False, **settings) as llm:
        return [generate(llm, [one])[0] for one in prompts(130, 40, 97, 65)]


@pytest.mark.parametrize(
    ("policy", "amount"),
    [
        ("window", "24"),
        ("h2o", "24"),
        ("snapkv", "30%"),
        ("keyformer", "30%"),
        ("pyramid", "24"),
        *[
            pytest.param(*costly, marks=pytest.mark.exhaustive)
            for costly in (
                ("window", "30%"),
                ("h2o", "30%"),
                ("snapkv", "24"),
                ("keyformer", "24"),
                ("pyramid", "30%"),
            )
        ],
    ],
)
def test_answers_are_those_of_a_reference(policy, amount):
    """In floats, where the reference is exact. Prompts are cut into chunks."""
    setting = f"{policy}:budget={amount},least=1"
    share = float(amount[:-1]) / 100 if amount.endswith("%") else None

    def budget(n):
        return int(amount) if share is None else max(1, -int(-n * share // 1))

    asked, num_answer = prompts(90, 20), 110
    types = {"kv_dtype": "float32", "max_chunk_tokens": 33}
    with engine(setting, **types) as llm:
        found = generate(llm, asked, greedy(num_answer))
        assert llm.stats().pages_in_use == 0
    reference = EvictingLlama(checkpoint("llama"), policy, budget, seed=5)
    expected = [[reference.generate(ids, num_answer)] for ids in asked]
    assert found == expected
    with engine("off", **types) as llm:
        assert generate(llm, asked, greedy(num_answer)) != expected, "something was dropped"


@pytest.mark.parametrize(
    ("policy", "kv_dtype"),
    [
        *[(policy, "int8") for policy in POLICIES],
        ("h2o", "float32"),
        ("pyramid", "bfloat16"),
        *[
            pytest.param(policy, kv_dtype, marks=pytest.mark.exhaustive)
            for policy in POLICIES
            for kv_dtype in ("float32", "bfloat16")
            if (policy, kv_dtype) not in (("h2o", "float32"), ("pyramid", "bfloat16"))
        ],
    ],
)
def test_a_budget_of_everything_changes_no_bit(policy, kv_dtype):
    asked = prompts(130, 40, 97)
    params = greedy(60, logprobs=3)

    def answers(setting):
        with engine(setting, kv_dtype=kv_dtype) as llm:
            found = llm.generate([{"prompt_token_ids": ids} for ids in asked], params)
        return [
            [{t: lp.logprob for t, lp in at.items()} for at in one.outputs[0].logprobs]
            for one in found
        ]

    expected = answers("off")
    assert answers(f"{policy}:budget=100%") == expected
    assert answers(f"{policy}:budget=256") == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_chunks_and_hits_change_no_token(policy):
    setting = f"{policy}:budget=24,least=1"
    expected = alone(setting)
    asked = prompts(130, 40, 97, 65)
    with engine(setting, max_chunk_tokens=17, max_num_batched_tokens=40) as llm:
        assert generate(llm, asked) == expected
        first = llm.stats().prefix_hit_tokens
        assert generate(llm, asked) == expected
        assert [generate(llm, [one])[0] for one in asked] == expected
        hits = llm.stats().prefix_hit_tokens - first
        # rows of h2o and keyformer all give scores
        assert (hits == 0) == (policy in ("h2o", "keyformer"))
        assert llm.stats().pages_in_use == 0
    assert llm.stats().pages_mapped == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_of_prompts_are_those_of_an_engine_that_keeps_all(policy):
    """What others take from the cache is whole: the prompt goes on where nothing is dropped."""
    (prompt,) = prompts(120)
    longer = [*prompt, *range(7, 20)]
    with engine(f"{policy}:budget=24,least=1", prefix_cache=False) as llm:
        expected = generate(llm, [longer], greedy(20))
    with engine(f"{policy}:budget=24,least=1") as llm:
        generate(llm, [prompt])
        assert generate(llm, [longer], greedy(20)) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_of_one_request_share_pages_and_write_to_their_own(policy):
    setting = f"{policy}:budget=24,least=1"
    (prompt,) = prompts(100)
    params = greedy(70, temperature=0.8, n=3)
    with engine(setting, prefix_cache=False) as llm:
        single = [
            generate(llm, [prompt], greedy(70, temperature=0.8, seed=5 + i)) for i in (0, 1, 2)
        ]
        expected = [[answer for one in single for answer in one[0]]]
    with engine(setting) as llm:
        assert generate(llm, [prompt], params) == expected
        assert generate(llm, [prompt], params) == expected
        assert llm.stats().pages_in_use == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_sequences_get_the_same_tokens(policy):
    setting = f"{policy}:budget=50%,least=1"
    asked = prompts(60, 50, 64, 40, 55, 62, seed=4)
    with engine(setting) as llm:
        expected = generate(llm, asked, greedy(150))
        assert llm.stats().num_preemptions == 0
    small = {"kv_cache_bytes": 80 << 10, "memory_policy": "prompt_only", "max_model_len": 256}
    with engine(setting, **small) as llm:
        assert until_preempted(llm, lambda: generate(llm, asked, greedy(150))) == expected
        assert llm.stats().pages_in_use == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_less_memory_is_held(policy):
    """Twelve answers whose whole K/V would not fit run at once, without a preemption."""
    setting, asked = f"{policy}:budget=16,least=1", prompts(*[60] * 12, seed=9)
    small = {"kv_cache_bytes": 200 << 10, "max_num_seqs": 12, "max_model_len": 256}
    with engine(setting, **small) as llm:
        generate(llm, asked, greedy(90))
        assert llm.stats().num_preemptions == 0
    with engine("off", **small, memory_policy="prompt_only") as llm:
        generate(llm, asked, greedy(90))
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_policy h2o cannot be used with kv_dtype int4"),
        ({"speculation": "mtp"}, "speculation mtp cannot be used with kv_policy h2o"),
        ({"kvp_segment_tokens": 128}, "kvp_segment_tokens"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        engine("h2o:budget=20,least=1", **settings)


@pytest.mark.parametrize(
    ("family", "variant", "problem"),
    [("mistral", "base", "windows"), ("deepseek_v3", "yarn", "latent K/V")],
)
def test_models_that_are_refused(family, variant, problem):
    with pytest.raises(ConfigError, match=f"kv_policy snapkv cannot be used .* {problem}"):
        LLM(str(checkpoint(family, variant)), kv_policy="snapkv:budget=20,least=1", **ROOMY)


def test_aborted_requests_leave_nothing():
    """In their prompts and in their answers, before and after tokens were dropped."""

    async def check():
        settings = {"dtype": "float32", "kv_dtype": "int8", "kv_policy": "h2o:budget=24,least=1"}
        engine = Engine(str(checkpoint("llama")), **settings, **SETTINGS, **ROOMY)
        await engine.start()
        try:
            for most in (0, 1, 30, 100):
                streams = [
                    engine.submit({"prompt_token_ids": ids}, greedy(150))
                    for ids in prompts(100, 90, 60, seed=most)
                ]
                for stream in streams:
                    count = 0
                    async for _ in stream:
                        count += 1
                        if count > most:
                            break
                    stream.abort()
            for _ in range(200):
                if engine.stats().num_unfinished == 0:
                    break
                await asyncio.sleep(0.02)
            stats = engine.stats()
            assert (stats.pages_in_use, stats.held_tokens, stats.num_running) == (0, 0, 0)
            assert stats.dropped_tokens > 0
            core = engine.loaded.core
            core.kv.check_integrity()
            assert not core._scheduler._eviction._sequences, "no scores are kept"
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "window"])
def test_failed_steps_change_no_token(policy, monkeypatch):
    """Rows of a failed step have given scores already: its sequences begin again."""
    setting = f"{policy}:budget=24,least=1"
    expected = alone(setting)
    with engine(setting) as llm:
        model = llm._loaded.core._runner._model
        forward, calls = model.forward, []

        def failing(*args):
            result = forward(*args)
            calls.append(len(args[0]))
            if len(calls) in (3, 40, 60):
                raise ValueError("a fault behind the last layer")
            return result

        monkeypatch.setattr(model, "forward", failing)
        assert generate(llm, prompts(130, 40, 97, 65)) == expected
        assert len(calls) > 60
        assert llm.stats().num_preemptions > 0
        assert llm.stats().pages_in_use == 0


def test_a_sequence_whose_tokens_cannot_be_moved_ends_alone(monkeypatch):
    setting = "snapkv:budget=24,least=1"
    expected = alone(setting)
    with engine(setting) as llm:
        scheduler = llm._loaded.core._scheduler
        choose, calls = scheduler._eviction.choose, []

        def failing(start, num_tokens):
            calls.append(num_tokens)
            if num_tokens == 97:
                raise MemoryError("no room for a copy")
            return choose(start, num_tokens)

        monkeypatch.setattr(scheduler._eviction, "choose", failing)
        inputs = [{"prompt_token_ids": ids} for ids in prompts(130, 40, 97, 65)]
        found = llm.generate(inputs, greedy(), use_tqdm=False)
        reasons = [output.outputs[0].finish_reason for output in found]
        assert reasons == ["length", "length", "error", "length"]
        answers = tokens_of(found)
        assert [answers[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
        assert sorted(calls) == [40, 65, 97, 130]
        assert llm.stats().pages_in_use == 0


def test_answers_that_follow_a_schema():
    """Masks that come late take rows back."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    params = greedy(120, structured=StructuredOutput("json_schema", schema))
    with engine("h2o:budget=24,least=1") as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts(90, 60)], params)
        assert llm.stats().pages_in_use == 0
    for output in found:
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length")


def test_what_is_held_is_counted():
    with engine("window:budget=24,least=1", max_num_seqs=1) as llm:
        generate(llm, prompts(100), greedy(100))
        stats = llm.stats()
        # 76 of the prompt, then 64 when 88 are held: at 164 computed tokens
        assert stats.dropped_tokens == 76 + 64
        assert stats.held_tokens == 0
    with engine("off") as llm:
        generate(llm, prompts(100), greedy(10))
        assert (llm.stats().dropped_tokens, llm.stats().held_tokens) == (0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_predicted_as_they_are_found(policy, monkeypatch):
    """So the time to the first token that is predicted does not count rows that are computed."""
    (prompt,) = prompts(130)
    params = greedy(80)
    with engine(f"{policy}:budget=24,least=1") as llm:
        view = llm._loaded.core.view
        # else a hit that takes longer to map than to compute is not used
        monkeypatch.setattr(llm._loaded.core.kv, "map_seconds", lambda hit: 0.0)
        request = dataclasses.replace(any_request(1, params), prompt_token_ids=tuple(prompt))
        assert view.num_cached_tokens(request) == 0
        generate(llm, [prompt])
        before = llm.stats().prefix_hit_tokens
        predicted = view.num_cached_tokens(request)
        generate(llm, [prompt])
        assert predicted == llm.stats().prefix_hit_tokens - before
        assert (predicted == 0) == (policy in ("h2o", "keyformer"))
        unlimited = dataclasses.replace(request, params=SamplingParams())
        assert view.num_cached_tokens(unlimited) == predicted
        empty = dataclasses.replace(request, prompt_token_ids=())
        assert view.num_cached_tokens(empty) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_of_prompts_are_on_disk(policy, tmp_path):
    """A restarted engine loads those that it uses, and drops the same tokens."""
    setting = f"{policy}:budget=24,least=1"
    expected = alone(setting)
    asked, disk = (
        prompts(130, 40, 97, 65),
        {"kv_cache_dir": str(tmp_path), "kv_disk_bytes": 4 << 20},
    )
    for _ in range(2):
        with engine(setting, **disk) as llm:
            assert generate(llm, asked) == expected
            assert llm.stats().pages_in_use == 0
            if policy in ("h2o", "keyformer"):  # others load what takes longer to compute
                assert llm.stats().disk_loaded_pages == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_answer_goes_on_elsewhere(policy):
    """With the tokens that it has so far, an engine drops what the first one did."""
    setting = f"{policy}:budget=24,least=1"
    whole = alone(setting)[2][0]
    (prompt,) = prompts(130, 40, 97)[2:]
    for length in (1, 20, 70):
        so_far = (AnswerSoFar(tuple(whole[:length])),)
        with engine(setting) as llm:
            assert generate(llm, [prompt], greedy(answers_so_far=so_far)) == [[whole]]


def test_a_gpu_is_refused():
    config = EngineConfig(model=str(checkpoint("llama")), kv_policy="window:budget=20,least=1")
    spec = read_spec(config.model_path)
    check_eviction(config, spec, "cpu", "int8")
    with pytest.raises(ConfigError, match="kv_policy window needs backend cpu, not cuda"):
        check_eviction(config, spec, "cuda", "int8")
    for setting in ("off", "quest:budget=20,least=1"):
        check_eviction(dataclasses.replace(config, kv_policy=setting), spec, "cuda", "int8")


def test_the_start_summary_tells_the_policy():
    async def lines():
        async with Engine(str(checkpoint("llama")), kv_policy="h2o:budget=25%", **ROOMY) as one:
            return engine_lines(one, 1.0)

    assert ("", "sequences keep 25 % of it, at least 128 tokens (h2o)") in asyncio.run(lines())
