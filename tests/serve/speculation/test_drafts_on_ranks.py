"""A draft model, or an EAGLE-3 head, beside a model on several ranks changes no token, and survives
lost ranks."""

from __future__ import annotations

from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from tests.serve.speculation.test_heads import GREEDY, Noted
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.models.draft_heads import EagleReference, write_eagle3
from tests.support.profile import every_day
from tests.support.speculation.heads import PLAIN, SMALL, check, settings_of
from tests.support.speculation.mixed_requests import requests, results
from tests.support.speculation.scripted import always_draft

pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA = str(checkpoint("llama"))
OTHER = str(checkpoint("qwen3", seed=1))
GRIDS = [(2, 1), (1, 2), (2, 2)]


def on_ranks(grid: tuple[int, int], draft: str, **settings: Any) -> LLM:
    """Returns a model on tensor ranks and stages, with a draft model."""
    settings |= {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
    return LLM(LLAMA, speculation="model", draft_model=draft, **SMALL | settings)


def expected_of(prompts: Any, params: Any, **settings: Any) -> list[Any]:
    with LLM(LLAMA, speculation="off", **SMALL | settings) as llm:
        return results(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("dtype", every_day([0], ["int8", "float32"]))
@pytest.mark.parametrize("draft", [LLAMA, OTHER])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_same_tokens(thread_workers, grid, draft, dtype):  # noqa: F811
    prompts, params = requests(300, 14, 30)
    expected = expected_of(prompts, params, dtype=dtype)
    with on_ranks(grid, draft, dtype=dtype) as llm:
        model = always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.stats()
        assert stats.num_draft_tokens > 100
        assert draft == OTHER or stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
        assert stats.pages_in_use == stats.draft_pages_in_use == 0
        assert not model._texts
        model._kv.check_integrity()


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_a_lost_rank(thread_workers, grid):  # noqa: F811
    """Sequences that are computed again keep their K/V in the draft model's memory."""
    prompts = [{"prompt_token_ids": [5 + i, *range(30, 60)]} for i in range(4)]
    params = [
        SamplingParams(max_tokens=60, temperature=i % 2 * 0.8, seed=i, ignore_eos=True)
        for i in range(4)
    ]
    expected = expected_of(prompts, params, dtype="int8")
    with on_ranks(grid, LLAMA, dtype="int8") as llm:
        model = always_draft(llm)
        draft, num_drafts = model.draft, 0

        def losing(*args: Any) -> list[list[int]]:
            nonlocal num_drafts
            num_drafts += 1
            if num_drafts == 4:
                thread_workers[0].workers[1]._engine.close()
            return draft(*args)

        model.draft = losing
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm._loaded.core._runner._group.num_formed == 2
        assert llm.stats().num_accepted_tokens > 50
        assert llm.stats().draft_pages_in_use == 0


def test_memory_is_divided(thread_workers):  # noqa: F811
    """The draft model gets as much as all ranks together, whose model it is."""
    size = 1 << 20
    with on_ranks((2, 1), LLAMA, kv_cache_bytes=size, kv_page_bytes=4096) as llm:
        model = always_draft(llm)
        own = llm._loaded.core.kv
        assert own.num_pages * own.page_bytes == size // 4
        assert 0.9 * size / 2 < model._kv.num_pages * model._kv.page_bytes <= size / 2


HEADS = [("llama", "base"), ("qwen3", "base"), ("gemma2", "head-24")]


@pytest.mark.parametrize("dtype", every_day([0], ["int8", "float32", "int4"]))
@pytest.mark.parametrize(("family", "variant"), HEADS)
def test_heads_change_no_token(thread_workers, family, variant, dtype, tmp_path):  # noqa: F811
    """Drafts reach pages that no step has used yet."""
    settings = SMALL | settings_of(tmp_path, "eagle3", family, variant) | {"dtype": dtype}
    settings |= {"tensor_parallel_size": 2, "kv_page_bytes": 4096}
    with LLM(**settings | PLAIN) as plain, LLM(**settings) as llm:
        assert check(llm, plain) > 100


def test_heads_beside_int4_kv(thread_workers, tmp_path):  # noqa: F811
    settings = settings_of(tmp_path, "eagle3", "llama", "base") | {"kv_dtype": "int4"}
    settings |= SMALL | {"max_model_len": 240}
    with LLM(**settings | PLAIN) as plain, LLM(**settings, tensor_parallel_size=2) as llm:
        assert check(llm, plain, 120) > 200


@pytest.mark.parametrize("has_embedding", [False, True])
def test_drafts_on_ranks_are_the_references(thread_workers, has_embedding, tmp_path):  # noqa: F811
    """The engine's rank has the whole head, and the whole table of the model's embeddings."""
    target, path = checkpoint("llama"), tmp_path / "head"
    reads: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    write_eagle3(path, target, as_speculators=has_embedding, **reads)
    settings = {"dtype": "float32", "kv_dtype": "float32", "kv_page_bytes": 8192}
    settings |= {"speculation": "eagle3", "draft_model": str(path), "tensor_parallel_size": 2}
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(5 + 40 * i)]} for i in range(3)]
    with LLM(str(target), **SMALL | settings) as llm:
        noted = Noted(llm, EagleReference(path, target, (0, 1, 1)))
        llm.generate(prompts, GREEDY, use_tqdm=False)
        noted.check(6)


def test_a_lost_rank_beside_a_head(thread_workers, tmp_path):  # noqa: F811
    settings = SMALL | settings_of(tmp_path, "eagle3", "llama", "base") | {"dtype": "int8"}
    prompts = [{"prompt_token_ids": [5 + i, *range(30, 60)]} for i in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(**settings | PLAIN) as plain, LLM(**settings, tensor_parallel_size=2) as llm:
        expected = results(plain.generate(prompts, params, use_tqdm=False))
        drafts, num_drafts = always_draft(llm), 0
        draft = drafts.draft

        def losing(*args: Any) -> list[list[int]]:
            nonlocal num_drafts
            num_drafts += 1
            if num_drafts == 4:
                thread_workers[0].workers[1]._engine.close()
            return draft(*args)

        drafts.draft = losing
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm._loaded.core._runner._group.num_formed == 2
        assert llm.stats().num_draft_tokens > 20


def test_no_drafts_where_pages_cannot_be_used(thread_workers, tmp_path):  # noqa: F811
    """A group that has just lost a rank maps no pages for the head."""
    settings = SMALL | settings_of(tmp_path, "eagle3", "llama", "base") | {"dtype": "int8"}
    with LLM(**settings | PLAIN) as plain, LLM(**settings, tensor_parallel_size=2) as llm:
        drafts, runner = always_draft(llm), llm._loaded.core._runner
        runner._group._lost.add(1)
        assert not runner.use_pages()
        runner._group._lost.clear()
        assert runner.use_pages()
        drafts._use_pages = lambda: False
        prompts, params = requests(300, 4, 20)
        expected = results(plain.generate(prompts, params, use_tqdm=False))
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.stats().num_draft_tokens == 0


def test_refused(tmp_path):
    for setting in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ConfigError, match=f"speculation mtp needs .*{next(iter(setting))}"):
            EngineConfig(speculation="mtp", **setting)
    settings = settings_of(tmp_path, "eagle3", "llama", "base")
    with pytest.raises(ConfigError, match=r"eagle3 needs .* leave out pipeline_parallel_size"):
        LLM(**settings, pipeline_parallel_size=2)
    settings = settings_of(tmp_path, "eagle3", "mistral", "long")
    with pytest.raises(ConfigError, match="with several ranks needs a model with a layer that"):
        LLM(**settings, tensor_parallel_size=2)
    for kind in ("model", "eagle3"):
        settings = settings_of(tmp_path, "eagle3", "llama", "base") | {"speculation": kind}
        settings["draft_model"] = LLAMA if kind == "model" else settings["draft_model"]
        with pytest.raises(ConfigError, match=f"speculation {kind} needs one GPU, not 2 ranks"):
            LLM(**settings, tensor_parallel_size=2, backend="cuda")
