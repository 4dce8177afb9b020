"""Converted models give Transformers' greedy tokens under mixed load, and use all of the engine."""

from __future__ import annotations

import random

import pytest

from serve import LLM, SamplingParams
from serve.models import FAMILIES
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.foreign import FOREIGN, eager_greedy, foreign
from tests.support.nodes.served_nodes import MIB, nodes
from tests.support.preempted import until_preempted
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST = [list(FOREIGN).index("helium")]
NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SHARED = [(7 * i) % 300 + 3 for i in range(60)]


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    own = [[rng.randrange(2, 320) for _ in range(n)] for n in (1, 5, 23, 70)]
    return own + [SHARED + tail for tail in ([], [5], [5, 9, 11])]


def _expected(family: str, prompts: list[list[int]]) -> list[list[int]]:
    return [eager_greedy(foreign(family), tuple(p), NUM_TOKENS) for p in prompts]


def _tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_the_families_have_no_row() -> None:
    assert not FOREIGN.keys() & FAMILIES.keys()


@pytest.mark.small_pages
@pytest.mark.parametrize("family", every_day(FIRST, list(FOREIGN)))
def test_greedy_tokens_equal_transformers(family):
    """Sampled requests run in the same batches; prompts come in chunks and share prefixes."""
    rng, targets = random.Random(5), _prompts(seed=1)
    others = [[rng.randrange(2, 320) for _ in range(rng.randint(1, 80))] for _ in range(8)]
    sampled = SamplingParams(max_tokens=30, temperature=0.9, ignore_eos=True)
    with LLM(
        str(foreign(family)),
        converter=True,
        dtype="float32",
        max_num_seqs=16,
        max_chunk_tokens=7,
        max_model_len=200,
        kv_page_bytes=4096,
        kv_cache_bytes=8 * MIB,
    ) as llm:
        params = [GREEDY] * len(targets) + [sampled] * len(others)
        outputs = llm.generate(targets + others, params, use_tqdm=False)
        again = llm.generate(targets, GREEDY, use_tqdm=False)
        stats = llm.stats()
    expected = _expected(family, targets)
    assert _tokens(outputs)[: len(targets)] == expected
    assert _tokens(again) == expected
    assert stats.prefix_hit_tokens > 0
    assert stats.pages_in_use == 0
    assert len({token for row in expected for token in row}) > 10, "answers that tell models apart"


@pytest.mark.small_pages
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", list(FOREIGN))
def test_preemption_changes_no_token(family):
    targets = _prompts(seed=3) + _prompts(seed=4)
    with LLM(
        str(foreign(family)),
        converter=True,
        dtype="float32",
        max_num_seqs=16,
        max_model_len=140,
        kv_page_bytes=4096,
        memory_policy="prompt_only",
        kv_cache_bytes=_pages(family) * 4096,
    ) as llm:
        twice = targets * 2
        outputs = until_preempted(llm, lambda: llm.generate(twice, GREEDY, use_tqdm=False))
    assert _tokens(outputs) == _expected(family, targets) * 2


def _pages(family: str) -> int:
    """Returns room for one long sequence and a little more; windows keep a part of theirs."""
    token_bytes = {"cohere": 1024, "phi": 512, "gpt_neox": 1024, "minicpm3": 2048}.get(family, 512)
    return -(-140 * token_bytes // 4096) + 6 + 2 * (family == "diffllama") * 18


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "int4"])
def test_other_types(dtype):
    """Rounded weights give other tokens than fp32, but the same for every way of batching."""
    targets = _prompts(seed=6)
    with LLM(
        str(foreign("helium")), converter=True, dtype=dtype, max_num_seqs=16, max_chunk_tokens=9
    ) as llm:
        together = llm.generate(targets, GREEDY, use_tqdm=False)
        alone = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in targets]
    assert _tokens(together) == _tokens(alone)
    expected = _expected("helium", targets)
    pairs = zip(_tokens(together), expected, strict=True)
    assert sum(a[0] == b[0] for a, b in pairs) >= len(targets) // 2, "first tokens are alike"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["helium", "gpt_neox"])
@pytest.mark.parametrize("prefill", ["local", "remote"])
def test_memory_nodes(family, prefill, tmp_path):
    targets = _prompts(seed=8)
    with (
        nodes("inproc", 2, tmp_path) as urls,
        LLM(
            str(foreign(family)),
            converter=True,
            dtype="float32",
            memory_nodes=urls,
            memory_prefill=prefill,
            max_num_seqs=8,
            max_model_len=200,
            kv_cache_bytes=16 * MIB,
        ) as llm,
    ):
        outputs = llm.generate(targets, GREEDY, use_tqdm=False)
        assert llm.stats().memory_nodes == 2
    assert _tokens(outputs) == _expected(family, targets)


@pytest.mark.exhaustive
@pytest.mark.small_pages
def test_a_disk_tier_is_not_shared_with_the_decoder(tmp_path):
    """The decoder rotates half against half where a class may rotate neighbours."""
    path, prompt = str(checkpoint("glm", "head-16")), [[*SHARED, 5]]
    settings = {"dtype": "float32", "kv_page_bytes": 4096, "kv_cache_bytes": 8 * MIB}
    found = {}
    for is_converted in (False, True, False, True):
        with LLM(path, converter=is_converted, kv_cache_dir=tmp_path, **settings) as llm:
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            found.setdefault(tuple(output.outputs[0].token_ids), []).append(
                output.metrics.num_cached_tokens > 0
            )
    assert list(found.values()) == [[False, False, True, True]]
    assert len(list(tmp_path.iterdir())) == 2
