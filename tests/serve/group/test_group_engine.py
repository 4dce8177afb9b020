"""An engine on any number of ranks gives the tokens and log-probabilities of one rank."""

from __future__ import annotations

import random

import pytest

from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.cli.eval import parse_precision
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import token_ids
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.profile import every_day

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SETTINGS = {"max_model_len": 140, "max_num_seqs": 8, "kv_page_bytes": 4096}
GRIDS = [(2, 1), (1, 2), (2, 2), (1, 3)]
TIGHT_BYTES = 128 << 10  # for about 200 tokens of int8 K/V


def requests(
    seed: int, count: int, most: int, *, halves: bool = False
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns prompts, some with a common prefix, and parameters, some sampled; halves: every
    second one."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 300) for _ in range(60)]
    prompts = [
        shared[: rng.choice([0, 50, 60])] + token_ids(rng.choice([1, 9, 40]), seed=seed + number)
        for number in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(5, most),
            temperature=0.9 * (number % 2) if halves else rng.choice([0.0, 0.9]),
            seed=rng.randrange(1000),
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if rng.random() < 0.2 else None,
        )
        for number in range(count)
    ]
    return prompts, params


def outputs(llm: LLM, prompts, params) -> list[object]:
    """Returns the tokens, and exact log-probabilities of tokens and prompts."""
    results = llm.generate(prompts, params, use_tqdm=False)
    return [
        (r.outputs[0].token_ids, r.outputs[0].cumulative_logprob, r.prompt_logprobs)
        for r in results
    ]


def on_grid(
    family: str,
    variant: str,
    grid: tuple[int, int],
    seed: int,
    *,
    count: int = 10,
    most: int = 30,
    halves: bool = False,
    **settings,
):
    """Returns the outputs of two rounds, so that the second finds prefixes, and statistics."""
    tensor, stages = grid
    path = str(checkpoint(family, variant))
    with LLM(
        path, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **SETTINGS | settings
    ) as llm:
        found = [outputs(llm, *requests(seed, count, most, halves=halves)) for _ in range(2)]
        stats = llm.stats()
        assert stats.pages_in_use == 0
    return found, stats


@pytest.mark.covering(1)
@pytest.mark.small_pages
@pytest.mark.parametrize("precision", ["float32", "int8", "int4", "int8/int4"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_give_the_tokens_of_one(thread_workers, grid, precision):  # noqa: F811
    """Prompts and decodes share steps, and prefixes are found. Pages have as many tokens on one
    rank, because fp32 attention to a found prefix may differ in the last bit."""
    dtype, kv_dtype = parse_precision(precision)
    settings = {"dtype": dtype, "kv_cache_bytes": 1 << 20, "max_chunk_tokens": 16}
    settings["kv_dtype"] = kv_dtype
    page_bytes = grid[0] * grid[1] * SETTINGS["kv_page_bytes"]
    variant = "tied" if grid[1] == 3 else "base"  # of three layers
    alone, _ = on_grid("llama", variant, (1, 1), 3, **settings | {"kv_page_bytes": page_bytes})
    found, stats = on_grid("llama", variant, grid, 3, **settings)
    assert found == alone
    # the pages of four ranks hold more tokens than the prompts
    assert grid == (2, 2) or stats.prefix_hit_tokens > 0
    assert thread_workers[0].num_started == grid[0] * grid[1] - 1


@pytest.mark.small_pages
@pytest.mark.parametrize(("grid", "num_pages"), list(zip(GRIDS, (6, 9, 5, 5), strict=True)))
def test_preempted_sequences_give_the_same_tokens(thread_workers, grid, num_pages):  # noqa: F811
    """Memory for few sequences; a model of three layers, so that three stages are possible."""
    settings = {"dtype": "int8", "memory_policy": "prompt_only"}
    alone, _ = on_grid("llama", "tied", (1, 1), 4, most=70, kv_cache_bytes=1 << 20, **settings)
    settings["kv_cache_bytes"] = grid[0] * grid[1] * num_pages * 4096
    for _ in range(5):  # what runs at once in a pipeline depends on the clock
        found, stats = on_grid("llama", "tied", grid, 4, most=70, **settings)
        assert found == alone
        if stats.num_preemptions:
            return
    pytest.fail("no sequence was preempted")


FOUR_RANKS = [(4, 1), (1, 4), (2, 2)]


@pytest.mark.exhaustive
@pytest.mark.small_pages
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("grid", FOUR_RANKS, ids=str)
def test_a_thousand_answers_of_four_ranks(thread_workers, grid, dtype):  # noqa: F811
    """Four ranks, mostly on fewer cores. Each case gives 56 greedy and 56 sampled answers, and in
    all cases together prompts and decodes share steps, prefixes are found and sequences preempted.
    fp32 K/V that is computed again may differ in the last bit, on one rank as well.
    """
    is_tight = dtype != "float32"
    few = {"memory_policy": "prompt_only", "prefix_cache": dtype == "int8"}
    settings = few | {"dtype": dtype, "max_chunk_tokens": 16, "max_num_seqs": 16}
    sizes = {"count": 28, "most": 40, "halves": True}
    room = {"kv_cache_bytes": 4 << 20, "kv_page_bytes": 4 * 4096}  # pages of as many tokens
    is_preempted = False
    for number in range(7):
        if number >= 2 and is_preempted == is_tight:
            break  # what runs at once in a pipeline depends on the clock
        seed = 6 + number
        alone, _ = on_grid("llama", "four", (1, 1), seed, **sizes, **settings | room)
        tight = {"kv_cache_bytes": TIGHT_BYTES if is_tight else 4 << 20}
        found, stats = on_grid("llama", "four", grid, seed, **sizes, **settings | tight)
        assert found == alone
        assert not few["prefix_cache"] or stats.prefix_hit_tokens > 0
        is_preempted |= stats.num_preemptions > 0
    assert is_preempted == is_tight


@pytest.mark.small_pages
@pytest.mark.parametrize(
    ("family", "variant"),
    every_day(
        [1],
        [
            ("deepseek_v3", "yarn"),
            ("qwen2_moe", "shared"),
            ("gemma3_text", "head-24"),
            ("gpt_oss", "yarn"),
            ("gemma4_text", "shared"),
            ("llama4_text", "chunks"),
        ],
    ),
)
@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_other_families(thread_workers, family, variant, grid):  # noqa: F811
    """Windows and chunks (several layer groups), latents, experts, sinks, layers that share K/V.

    Attention in heads of a size that the native kernels do not have depends on the batch in its
    last bits, so tokens are compared; test_shard.py compares the bits of the models.
    """
    settings = {"dtype": "float32", "kv_cache_bytes": 4 << 20, "prefix_cache": False}
    alone, _ = on_grid(family, variant, (1, 1), 5, count=3, **settings)
    found, _ = on_grid(family, variant, grid, 5, count=3, **settings)
    assert [[one[0] for one in each] for each in found] == [
        [one[0] for one in each] for each in alone
    ]


def test_settings_that_a_group_does_not_have_are_named(tmp_path):
    path = str(checkpoint("llama", "base"))
    with pytest.raises(ConfigError, match="tensor_parallel_size 3: the model's 4 attention heads"):
        LLM(path, tensor_parallel_size=3, **SETTINGS)
    with pytest.raises(ConfigError, match="divided into: it has 2 layers"):
        LLM(path, pipeline_parallel_size=9, **SETTINGS)
    with pytest.raises(ConfigError, match="memory_nodes"):
        LLM(path, tensor_parallel_size=2, memory_nodes=[f"shm://{tmp_path}/node"], **SETTINGS)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be a positive integer"):
        LLM(path, tensor_parallel_size=0, **SETTINGS)
