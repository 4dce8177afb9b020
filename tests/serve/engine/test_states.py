"""Engines of models whose layers have states: turns of a chat, forks, and steps that fail."""

from __future__ import annotations

import pytest

from memory.kv_manager import KVManager
from ops.cpu import native_library
from serve import LLM, FinishReason, SamplingParams
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint, reference_greedy

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
KINDS = ["lfm2", "qwen3_5_text"]
SETTINGS = {"max_model_len": 600, "max_num_seqs": 8, "kv_cache_bytes": 16 << 20}
INTERVAL = 64  # of so small states
PROMPT = [(7 * i) % 290 + 3 for i in range(200)]


def greedy(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, n=n)


def tokens_of(llm: LLM, prompts: list[list[int]], params) -> list[list[list[int]]]:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(requests, params, use_tqdm=False)
    assert llm.stats().pages_in_use == 0
    llm._loaded.core.kv.check_integrity()
    return [[output.token_ids for output in result.outputs] for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_turns_compute_only_what_is_new(kind, monkeypatch):
    """Each turn computes its own tokens and at most one interval before them."""
    # so small a model may compute a prefix faster than a busy machine maps its pages
    monkeypatch.setattr(KVManager, "map_seconds", lambda self, hit: 0.0)
    path = checkpoint(kind, "long")
    with LLM(str(path), dtype="float32", **SETTINGS) as llm:
        assert llm._loaded.core.kv.layout.groups[-1].tile_tokens == INTERVAL
        text: list[int] = []
        for turn in range(10):
            text += [(11 * i + turn) % 290 + 3 for i in range(25)]
            hits = llm.stats().prefix_hit_tokens
            ((answer,),) = tokens_of(llm, [text], greedy(20))
            num_hit = llm.stats().prefix_hit_tokens - hits
            seen = 45 * turn - 1  # the last token of an answer was never computed
            assert num_hit >= seen - seen % INTERVAL if turn else num_hit == 0
            assert answer == reference_greedy(path, text, 20), f"turn {turn}"
            text += answer


@pytest.mark.parametrize("kind", KINDS)
def test_forks_and_shared_prompts_have_states_of_their_own(kind):
    path = checkpoint(kind, "long")
    with LLM(str(path), dtype="float32", prefix_cache=False, **SETTINGS) as llm:
        drawn = SamplingParams(temperature=1.0, max_tokens=30, seed=3, n=4, ignore_eos=True)
        (expected,) = tokens_of(llm, [PROMPT], drawn)
    assert len(set(map(tuple, expected))) == 4
    with LLM(str(path), dtype="float32", max_chunk_tokens=50, **SETTINGS) as llm:
        assert tokens_of(llm, [PROMPT] * 3, drawn) == [expected] * 3
        assert llm.stats().prefix_hit_tokens > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_of_any_size_give_the_same_tokens(kind, chunk):
    path = checkpoint(kind, "long")
    prompt = [(13 * i) % 290 + 3 for i in range(560)]
    with LLM(
        str(path), dtype="float32", max_chunk_tokens=chunk, max_num_batched_tokens=512, **SETTINGS
    ) as llm:
        tokens = tokens_of(llm, [prompt, PROMPT], greedy(20))
    assert tokens == [[reference_greedy(path, each, 20)] for each in (prompt, PROMPT)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_ends_one_request_and_changes_no_other(kind, monkeypatch):
    """The step fails after it has changed the states of all of its sequences."""
    path = checkpoint(kind, "long")
    prompts = [PROMPT[i : i + 90] for i in range(5)]
    with LLM(str(path), dtype="float32", **SETTINGS) as llm:
        expected = tokens_of(llm, prompts, greedy(40))
        runner = llm._loaded.core._executor._runner
        run, num_failed = runner.run, 0

        def fails(plan, launched):
            nonlocal num_failed
            result = run(plan, launched)
            for sequence in plan.sequences:
                if sequence.token_ids[:90] == prompts[2] and sequence.num_output_tokens >= 7:
                    num_failed += 1
                    raise ZeroDivisionError
            return result

        monkeypatch.setattr(runner, "run", fails)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(requests, greedy(40), use_tqdm=False)
        for index, result in enumerate(results):
            output = result.outputs[0]
            if index == 2:
                assert output.finish_reason == FinishReason.ERROR.value
                assert len(output.token_ids) >= 7  # a draft may have given several at once
                assert output.token_ids == expected[2][0][: len(output.token_ids)]
            else:
                assert output.token_ids == expected[index][0], f"prompt {index}"
        assert num_failed == 2  # with the others, and alone
        assert llm.stats().pages_in_use == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kv_listen", "127.0.0.1:0"), ("tensor_parallel_size", 2)],
)
def test_what_does_not_know_states_is_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=setting):
        LLM(str(checkpoint("lfm2", "long")), **{setting: value}, **SETTINGS)
