"""A draft model changes no token: the target itself, and models that agree with it in nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ops.cpu.sampling import SamplingInputs
from serve import LLM, Engine, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.speculation.draft_model import _Text
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.profile import every_day
from tests.support.speculation.mixed_requests import requests, results
from tests.support.speculation.scripted import always_draft

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 160, "max_num_batched_tokens": 600}
LLAMA = str(checkpoint("llama"))
OTHER = str(checkpoint("qwen3", seed=1))


def drafting(target: str, draft: str, **settings: Any) -> LLM:
    return LLM(target, speculation="model", draft_model=draft, **SMALL | settings)


def check(target: str, draft: str, most: int = 30, **settings: Any) -> tuple[int, int]:
    """Compares answers with those without drafts. Returns the draft tokens and the accepted."""
    prompts, params = requests(300, 14, most)
    with LLM(target, speculation="off", **SMALL | settings) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    with drafting(target, draft, **settings) as llm:
        model = always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.stats()
        assert stats.pages_in_use == stats.draft_pages_in_use == 0
        assert not model._texts and not model._refused
        model._kv.check_integrity()
    return stats.num_draft_tokens, stats.num_accepted_tokens


FAMILIES = [
    ("gemma2", "head-24"),
    ("mistral", "long"),
    ("gpt2", "base"),
    ("deepseek_v3", "yarn"),
    ("llama4_text", "chunks"),
]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_target_as_its_own_draft(dtype):
    drafted, accepted = check(LLAMA, LLAMA, dtype=dtype)
    assert drafted > 100
    assert accepted > 0.9 * drafted


@pytest.mark.parametrize(("family", "variant"), every_day([1, 4], FAMILIES), ids=str)
def test_families_as_drafts(family, variant):
    """Windows, chunks, learned positions and latents; each is also its own draft."""
    path = str(checkpoint(family, variant))
    check(LLAMA, path, dtype="int8")
    drafted, accepted = check(path, path, 60, dtype="int8", kv_page_bytes=4096)
    assert accepted > 0.7 * drafted > 100


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_other_family(dtype):
    drafted, accepted = check(LLAMA, OTHER, dtype=dtype)
    assert drafted > 100
    assert accepted < 0.3 * drafted


def test_preemption():
    prompts = [{"prompt_token_ids": [*range(5, 69), 100 + i]} for i in range(8)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 8
    settings = {"dtype": "int8", "kv_page_bytes": 4096, "memory_policy": "prompt_only"}
    with LLM(LLAMA, speculation="off", **SMALL | settings) as llm:
        num_pages = llm._loaded.core.kv.pages_for(160)
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    some = 2 * (2 * num_pages + 1) * 4096
    with drafting(LLAMA, LLAMA, kv_cache_bytes=some, **settings) as llm:
        always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.stats()
        assert stats.num_preemptions
        assert stats.num_accepted_tokens > 50
        assert stats.pages_in_use == stats.draft_pages_in_use == 0


@pytest.mark.parametrize("salt", [None, "other"])
def test_prefix_is_computed_once(salt):
    """The second request with a prompt finds its K/V in the draft model's memory, unless it has
    another salt."""
    path = str(checkpoint("gemma2", "head-256"))  # whose pages hold few tokens
    prompt = {"prompt_token_ids": list(range(5, 125))}
    rows: list[int] = []
    with drafting(LLAMA, path, dtype="int8") as llm:
        model = always_draft(llm)
        forward = model._forward

        def counted(parts: list[Any], **settings: Any) -> Any:
            rows.append(sum(len(part.tokens) for part in parts))
            return forward(parts, **settings)

        model._forward = counted  # type: ignore[method-assign]
        counts = []
        for each in (None, salt):
            params = SamplingParams(max_tokens=9, temperature=0.0, cache_salt=each, ignore_eos=True)
            rows.clear()
            llm.generate(prompt, params, use_tqdm=False)
            counts.append(sum(rows))
        assert counts[0] > 120
        assert (counts[1] < counts[0] - 40) == (salt is None)
        assert model._kv.num_cached > 0
        model._kv.check_integrity()


@pytest.mark.parametrize("draft", [LLAMA, OTHER])
def test_grammars(draft):
    """Masks of the drafted positions end drafts that they forbid."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=0.8 * (i % 2),
            seed=i,
            structured=StructuredOutput("json_schema", json.dumps(schema)),
        )
        for i in range(4)
    ]
    prompts = [f"number {i}" for i in range(4)]
    with LLM(LLAMA, speculation="off", **SMALL) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    with drafting(LLAMA, draft) as llm:
        always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.stats().num_draft_tokens > 5
        assert llm.stats().draft_pages_in_use == 0


def test_abort_frees_the_memory():
    async def run() -> None:
        settings = SMALL | {"speculation": "model", "draft_model": LLAMA}
        async with Engine(LLAMA, **settings) as engine:
            params = SamplingParams(max_tokens=140, ignore_eos=True)
            stream = engine.submit([5, 6, 7], params)
            seen = 0
            async for _ in stream:
                seen = engine.stats().draft_pages_in_use
                if seen:
                    break
            stream.abort()
            assert seen
            while engine.stats().num_unfinished or engine.stats().num_running:
                await asyncio.sleep(0.01)
            assert engine.stats().draft_pages_in_use == 0

    asyncio.run(run())


def test_smaller_vocabulary_and_context():
    """Sequences with tokens that the draft model has no row for, or longer than its context, have
    no drafts; others have."""
    draft = str(checkpoint("llama", "odd-vocab"))
    few = [SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)] * 2
    with drafting(LLAMA, draft) as llm:
        model = always_draft(llm)
        model._kv.max_model_len = 48
        prompts = [{"prompt_token_ids": [319, 5]}, {"prompt_token_ids": list(range(9, 60))}]
        llm.generate(prompts, few, use_tqdm=False)
        assert llm.stats().num_draft_tokens == 0
        llm.generate([{"prompt_token_ids": [7, 5]}], few[:1], use_tqdm=False)
        assert llm.stats().num_draft_tokens > 0
        assert not model._refused


def test_no_room():
    """A sequence for which the draft model has no memory is answered without drafts."""
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 4
    prompts = [{"prompt_token_ids": [i + 9, *range(70)]} for i in range(4)]
    with LLM(LLAMA, speculation="off", **SMALL) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    with drafting(LLAMA, LLAMA, kv_page_bytes=4096) as llm:
        model = always_draft(llm)
        kept = model._kv.allocator
        held = [kept.take() for _ in range(kept.num_free - model._kv.pages_for(200))]
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.stats().num_accepted_tokens > 20
        assert llm.stats().draft_pages_in_use == len(held)


def test_memory_is_divided():
    """Both models get room for as many tokens."""
    size = 1 << 20
    with drafting(LLAMA, LLAMA, kv_cache_bytes=size, kv_page_bytes=4096) as llm:
        model = always_draft(llm)
        pages = llm._loaded.core.kv.num_pages
        assert pages == size // 2 // 4096
        assert model._kv.num_pages * model._kv.page_bytes <= size // 2


def test_wrong_settings():
    with pytest.raises(ConfigError, match="speculation model needs draft_model"):
        EngineConfig(speculation="model")
    with pytest.raises(ConfigError, match="draft_model needs speculation model or eagle3"):
        LLM(LLAMA, draft_model=LLAMA, speculation="lookup")
    with pytest.raises(ConfigError, match=r"draft_model: .* gives tokens other ids"):
        drafting("default", LLAMA)


@pytest.mark.parametrize(
    ("tokens", "num_computed"),
    [
        ([1, 2, 3, 7, 4], 4),
        ([1, 2, 3, 7, 4, 6], 4),
        ([1, 2, 3, 4], 3),
        ([1, 2, 3, 7, 8, 9, 5], 5),
        ([1, 2], 1),
    ],
)
def test_only_accepted_tokens_stay_computed(tokens, num_computed):
    """Of three draft tokens behind three known ones, the first two have K/V."""
    text = _Text(target=None, inputs=SamplingInputs(seed=0, temperature=0.0))  # type: ignore[arg-type]
    text.num_known, text.drafted, text.num_computed = 3, [7, 8, 9], 5
    text.settle(tokens)
    assert (text.num_computed, text.drafted) == (num_computed, [])
