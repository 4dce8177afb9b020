"""A draft model beside a model on several ranks changes no token, and survives lost ranks."""

from __future__ import annotations

from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.profile import every_day
from tests.support.speculation.heads import SMALL, settings_of
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


@pytest.mark.covering(1)
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


def test_refused(tmp_path):
    for setting in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        for head in ({"speculation": "mtp"}, settings_of(tmp_path, "eagle3", "llama", "base")):
            wanted = f"speculation {head['speculation']} needs .* leave out {next(iter(setting))}"
            with pytest.raises(ConfigError, match=wanted):
                EngineConfig(**head, **setting)
    settings = settings_of(tmp_path, "eagle3", "llama", "base")
    settings |= {"speculation": "model", "draft_model": LLAMA}
    with pytest.raises(ConfigError, match="speculation model needs one GPU, not 2 ranks"):
        LLM(**settings, tensor_parallel_size=2, backend="cuda")
