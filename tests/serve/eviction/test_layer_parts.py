"""Layer groups with pages of their own where upper layers keep less: beside one group of all."""

from __future__ import annotations

import functools

import pytest
import torch

from memory.attention.seam import AttentionLayer
from serve import LLM
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading import kv_layouts
from serve.loading.kv_layouts import expected_groups, grouped_layers, part_layers
from serve.loading.precision import Precision
from serve.models import read_spec
from tests.serve.eviction.test_eviction import greedy, prompts
from tests.support.engine.checkpoints import checkpoint
from tests.support.preempted import until_preempted

pytestmark = pytest.mark.small_pages
LENGTHS = (128, 40, 97, 65, 120)
SETTING = "pyramid:budget=50%,least=1"


def engine(num_groups, model=None, **settings):
    """Returns an engine of at most so many layer groups."""
    given = {"dtype": "float32", "kv_dtype": "int8", "kv_policy": SETTING, "seed": 3}
    given |= {"kv_page_bytes": 4096, "max_num_seqs": 8, "max_model_len": 256}
    given |= {"kv_cache_bytes": 8 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layouts, "_MOST_GROUPS", num_groups)
        llm = LLM(model or str(checkpoint("llama")), **(given | settings))
    assert len(llm._loaded.core.kv.layout.groups) == num_groups
    return llm


def scored(llm, asked, params=None):
    """Returns the tokens of the answers, with the bits of what they were chosen by."""
    params = params or greedy(100, logprobs=2)
    found = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    return [
        [[{t: lp.logprob for t, lp in at.items()} for at in one.logprobs] for one in output.outputs]
        for output in found
    ]


@functools.cache
def of_one_group(num=1):
    params = greedy(100, logprobs=2, n=num, temperature=0.0 if num == 1 else 0.8)
    with engine(1) as llm:
        return scored(llm, prompts(*LENGTHS), params)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_groups_in_floats_change_no_bit(kv_dtype):
    """One after the other, since sums in floats are others in other chunks."""
    found = []
    for num_groups in (1, 2):
        with engine(num_groups, kv_dtype=kv_dtype) as llm:
            found.append([scored(llm, [one]) for one in prompts(128, 97)])
    assert found[0] == found[1]


def test_groups_change_no_bit():
    """Together, in chunks, after hits of the prompts' pages, and one after the other."""
    asked, expected = prompts(*LENGTHS), of_one_group()
    settings = {"max_chunk_tokens": 17, "max_num_batched_tokens": 40}
    with engine(2, **settings) as llm:
        assert scored(llm, asked) == expected
        assert scored(llm, asked) == expected
        assert llm.stats().prefix_hit_tokens > 0
        assert [scored(llm, [one])[0] for one in asked] == expected
        assert llm.stats().pages_in_use == 0
        llm._loaded.core.kv.check_integrity()
    assert llm.stats().pages_mapped == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_groups_of_several_layers_change_no_bit(num_groups):
    asked, settings = prompts(700, 300, 90), {"dtype": "int8", "kv_dtype": "int8"}
    settings["max_model_len"] = 1024
    with engine(1, DEFAULT_MODEL, **settings) as llm:
        expected = scored(llm, asked)
    with engine(num_groups, DEFAULT_MODEL, **settings) as llm:
        assert scored(llm, asked) == expected
        assert llm.stats().pages_in_use == 0


def test_outputs_that_share_pages_change_no_bit():
    params = greedy(100, logprobs=2, n=3, temperature=0.8)
    expected = of_one_group(num=3)
    with engine(2) as llm:
        for _ in range(2):
            assert scored(llm, prompts(*LENGTHS), params) == expected
        assert llm.stats().pages_in_use == 0


def test_preempted_sequences_change_no_bit():
    asked, expected = prompts(*LENGTHS), of_one_group()
    small = {"kv_cache_bytes": 20 * 4096, "memory_policy": "prompt_only"}
    with engine(2, **small) as llm:
        assert until_preempted(llm, lambda: scored(llm, asked)) == expected
        assert llm.stats().pages_in_use == 0
        llm._loaded.core.kv.check_integrity()


def watched(llm, watch):
    """Calls watch(scheduler) after each step of an engine."""
    scheduler = llm._loaded.core._scheduler
    update = scheduler.update

    def updating(*args, **named):
        finished = update(*args, **named)
        watch(scheduler)
        return finished

    scheduler.update = updating


def test_pages_in_use_are_those_of_tokens_that_layers_hold():
    """Counted from the lengths that attention has, layer by layer."""
    seen = []

    def watch(scheduler):
        attention, kv, total = scheduler._eviction, scheduler.kv, 0
        has_dropped = 0
        for sequence in scheduler.running:
            target = sequence.kv_range
            shorter = attention._sequences[target.start].shorter or [0, 0]
            length = sequence.num_computed_tokens - target.dropped
            # 16 tokens of one layer's K/V are a page
            total += sum(-(-(length - less) // 16) for less in shorter)
            has_dropped += shorter != [0, 0]
        assert kv.num_in_use == total
        seen.append((has_dropped, total))

    asked = prompts(128, 112, 96, 120)
    with engine(2, kv_dtype="float32", prefix_cache=False) as llm:
        watched(llm, watch)
        scored(llm, asked)
        assert llm.stats().pages_in_use == 0
    # 96 and 32, 84 and 28, 72 and 24, 90 and 30 tokens, and so many more of the answers
    most = max(total for number, total in seen if number == 4)
    assert 6 + 2 + 6 + 2 + 5 + 2 + 6 + 2 < most <= 4 * (7 + 7) + 6 + 2 + 6 + 2 + 5 + 2 + 6 + 2


@pytest.mark.parametrize("memory_policy", ["worst_case", "predicted"])
def test_more_sequences_are_admitted(memory_policy):
    """Sequences of 128 tokens, of which the layers keep 128 and 48, and 60 more."""

    def most_running(num_groups):
        most = []
        settings = {"kv_policy": "pyramid:budget=96", "kv_cache_bytes": 150 * 4096}
        settings |= {"memory_policy": memory_policy, "max_num_seqs": 12, "prefix_cache": False}
        settings["kv_dtype"] = "float32"
        with engine(num_groups, **settings) as llm:
            watched(llm, lambda scheduler: most.append(len(scheduler.running)))
            scored(llm, prompts(*[128] * 12), greedy(60, logprobs=1))
            preempted = llm.stats().num_preemptions
        assert memory_policy == "predicted" or preempted == 0
        return max(most)

    few, many = most_running(1), most_running(2)
    assert few < many
    if memory_policy == "worst_case":  # 12 pages each for 188 tokens, and 7 for 108
        assert (few, many) == (150 // 24, 150 // 19)


def config_of(**settings):
    given = {"model": DEFAULT_MODEL, "kv_policy": "pyramid:budget=25%", "kv_cache_bytes": 64 << 20}
    return EngineConfig(**(given | settings))


PRECISION = Precision(torch.float32, "int8", "int8")


@pytest.mark.parametrize(
    ("num_layers", "page_bytes", "most", "least"),
    [(1, None, 1, 1), (2, None, 2, 2), (5, None, 5, 5), (32, None, 8, 8), (32, 2 << 20, 4, 2)],
)
def test_groups_are_as_many_as_pay(num_layers, page_bytes, most, least):
    layers = [AttentionLayer(8, 8, 64, 0.125)] * num_layers
    config = config_of(kv_page_bytes=page_bytes, kv_cache_bytes=1 << 28)
    parts = part_layers(config, PRECISION, layers, 4096)
    assert [layer for numbers in parts for layer in numbers] == [*range(num_layers)]
    sizes = list(map(len, parts))
    assert least <= len(parts) <= most and max(sizes) - min(sizes) <= 1
    # nothing is gained where a whole sequence's budget is a few pages
    few = config_of(kv_page_bytes=64 << 20, kv_cache_bytes=1 << 34)
    assert part_layers(few, PRECISION, layers, 4096) == [[*range(num_layers)]]


def test_only_pyramid_has_groups():
    layers = [AttentionLayer(8, 8, 64, 0.125)] * 8
    for policy in ("off", "window:budget=25%", "h2o:budget=25%", "snapkv:budget=25%"):
        found = grouped_layers(config_of(kv_policy=policy), PRECISION, layers, 4096)
        assert found == [(None, [*range(8)])]
    assert len(grouped_layers(config_of(), PRECISION, layers, 4096)) == 8


def test_what_fits_is_told_before_a_model_is_loaded():
    config = config_of()
    groups = expected_groups(config, PRECISION, read_spec(config.model_path))
    with LLM(DEFAULT_MODEL, dtype="int8", kv_policy=config.kv_policy) as llm:
        layout = llm._loaded.core.kv.layout
        assert [group.layers.token_bytes for group in layout.groups] == [
            group.token_bytes for group in groups
        ]
