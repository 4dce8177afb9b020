"""The engine over int4 K/V reads recent tokens in int8: by the rule, and with the same bits however
a sequence is computed."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch

from memory.attention.seam import Attention
from ops.cpu import native_library
from quant.kv import RECENT_BLOCK
from serve import LLM, SamplingParams
from serve.cli.eval import parse_precision
from serve.cli.quality import evaluate
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.model_source import load_weights, read_source
from serve.models.progress import LoadProgress
from serve.text.tokenizer import Tokenizer
from tests.support.engine.logprobs import divergence, logprobs_of
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.memory.one_store import one_store
from tests.support.memory.recent_kv import RecentReference
from tests.support.preempted import until_preempted
from tests.support.speculation.scripted import always_draft, check_drafted

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
HELDOUT = Path(__file__).parents[2] / "bench" / "data" / "heldout.txt"
LENGTHS = (1, 100, 127, 128, 129, 250, 256, 300, 517)
SETTINGS = {"dtype": "int8", "kv_dtype": "int4", "max_model_len": 640, "max_num_seqs": 12}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns random tokens, of which prompts of one seed have the same first ones."""
    rng = random.Random(seed)
    return [rng.randrange(5, 4000) for _ in range(length)]


@functools.cache
def text(length: int) -> list[int]:
    """Returns the first tokens of a text."""
    config = EngineConfig(model=DEFAULT_MODEL)
    tokenizer = Tokenizer.load(config.tokenizer_path, model=config.model_path)
    return tokenizer.encode(HELDOUT.read_text(encoding="utf-8"))[:length]


def params(count: int = 12, **settings) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0} | settings
    )


def answers(llm: LLM, prompts: list[list[int]], one: SamplingParams) -> list[object]:
    """Returns each answer's tokens with their log-probabilities; afterwards no page is in use."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], one, use_tqdm=False)
    assert llm.stats().pages_in_use == 0
    llm._loaded.core.kv.check_integrity()
    return [
        [(t, given[t].logprob) for t, given in zip(o.token_ids, o.logprobs, strict=True)]
        for output in outputs
        for o in output.outputs
    ]


def prompts_of_all_lengths() -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


@functools.cache
def expected() -> list[object]:
    with LLM(DEFAULT_MODEL, prefix_cache=False, **SETTINGS) as llm:
        return answers(llm, prompts_of_all_lengths(), params())


@functools.cache
def reference(has_recent: bool) -> torch.Tensor:
    """Returns the log-probabilities after each token of a text, by slow attention in fp64."""
    model = load_weights(
        read_source(EngineConfig(model=DEFAULT_MODEL, dtype="float32")), LoadProgress()
    )
    tokens = text(400)
    attention: Attention = RecentReference(model.attention_layers(), has_recent=has_recent)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        return torch.log_softmax(model.logits(hidden), -1).double()


def test_rows_read_their_own_block_in_int8_and_earlier_tokens_in_int4():
    found = logprobs_of(DEFAULT_MODEL, "float32/int4", text(400))
    with one_store():
        plain = logprobs_of(DEFAULT_MODEL, "float32/int4", text(400))
    error = float(divergence(reference(True), found).mean())
    assert error < 1e-5
    assert error < 0.05 * float(divergence(reference(False), found).mean())
    assert error < 0.05 * float(divergence(reference(True), plain).mean()), "of another rule"


def test_the_divergence_of_a_text_is_a_fraction_of_that_of_int4_alone():
    content = HELDOUT.read_text(encoding="utf-8")
    both = [parse_precision(name) for name in ("float32", "float32/int4")]
    found = evaluate("default", content, both, max_tokens=2000)[1]
    with one_store():
        plain = evaluate("default", content, both, max_tokens=2000)[1]
    assert 0 < found.kl < 0.2 * plain.kl
    whole = evaluate("default", content, [parse_precision("float32/int8")], max_tokens=300)[0]
    assert found.kv_bytes_per_token < 0.56 * whole.kv_bytes_per_token


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_answers_do_not_depend_on_the_chunks(chunk):
    settings = SETTINGS | {"max_chunk_tokens": chunk, "max_num_batched_tokens": 512}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        assert answers(llm, prompts_of_all_lengths(), params()) == expected()


def test_answers_do_not_depend_on_the_sequences_beside_them():
    with LLM(DEFAULT_MODEL, prefix_cache=False, **SETTINGS) as llm:
        alone = [answers(llm, [one], params())[0] for one in prompts_of_all_lengths()]
    assert alone == expected()


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_bytes", [None, 4096, 64 << 10])
@pytest.mark.parametrize("shared", [100, 128, 200, 256, 300, 384])
def test_a_prefix_hit_changes_no_bit(page_bytes, shared):
    """Hits end within blocks and at their ends, and pages hold parts of blocks or several."""
    first = prompt(420, seed=3)
    prompts = [[*first[:shared], *prompt(40, seed=i)] for i in range(4, 7)]
    settings = SETTINGS | {"kv_page_bytes": page_bytes, "kv_cache_bytes": 24 << 20}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        without = [answers(llm, [one], params())[0] for one in (first, *prompts)]
    with LLM(DEFAULT_MODEL, **settings) as llm:
        assert [answers(llm, [one], params())[0] for one in (first, *prompts)] == without
        hits = llm.stats().prefix_hit_tokens
        if page_bytes == 4096:
            assert hits >= len(prompts) * (shared - 32)
        assert answers(llm, [first, *prompts], params()) == without
        assert llm.stats().prefix_hit_tokens > hits


def test_the_next_turn_goes_on_within_a_block():
    """The recent tokens of a finished sequence are found."""
    settings = SETTINGS | {"kv_page_bytes": 4096, "kv_cache_bytes": 24 << 20}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        first = prompt(300, seed=8)
        said = [token for token, _ in answers(llm, [first], params(60))[0]]
        turn = [*first, *said, *prompt(10, seed=9)]
        hits = llm.stats().prefix_hit_tokens
        found = answers(llm, [turn], params())
        assert llm.stats().prefix_hit_tokens - hits >= 360 - 32
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        assert answers(llm, [turn], params()) == found


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_are_the_same_after_preemption(prefix_cache):
    # Any two of the prompts fit beside each other, and no two of the answers do.
    prompts, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    settings = SETTINGS | {"max_num_seqs": 4, "prefix_cache": prefix_cache, "kv_page_bytes": 4096}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        roomy = answers(llm, prompts, one)
    little = {"kv_cache_bytes": 950 << 10, "memory_policy": "prompt_only"}
    with LLM(DEFAULT_MODEL, **settings | little | {"max_model_len": 420}) as llm:
        assert until_preempted(llm, lambda: answers(llm, prompts, one)) == roomy


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_ranks_have_the_bits_of_one_process_and_go_on_from_disk(thread_workers, grid, tmp_path):  # noqa: F811
    ranks = {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
    disk = {"kv_cache_dir": str(tmp_path), "kv_disk_bytes": 64 << 20}
    prompts = prompts_of_all_lengths()
    for is_new in (True, False):
        with LLM(DEFAULT_MODEL, **SETTINGS, **ranks, **disk) as llm:
            outputs = llm.generate(prompts, params(), use_tqdm=False)
            stats = llm.stats()
        assert [
            [(t, x[t].logprob) for t, x in zip(o.token_ids, o.logprobs, strict=True)]
            for each in outputs
            for o in each.outputs
        ] == expected()
        assert (stats.disk_loaded_pages == 0) == is_new
        assert stats.pages_in_use == 0


def test_a_sequence_goes_on_from_disk_after_a_restart(tmp_path):
    settings = SETTINGS | {
        "kv_page_bytes": 4096,
        "kv_cache_bytes": 4 << 20,
        "kv_cache_dir": str(tmp_path),
        "kv_disk_bytes": 64 << 20,
    }
    first = prompt(300, seed=8)
    with LLM(DEFAULT_MODEL, **settings) as llm:
        said = [token for token, _ in answers(llm, [first], params(60))[0]]
    turn = [*first, *said, *prompt(10, seed=9)]
    with LLM(DEFAULT_MODEL, **settings) as llm:
        found, stats = answers(llm, [turn], params()), llm.stats()
        assert stats.disk_loaded_pages > 0
        assert stats.prefix_hit_tokens >= 360 - 32, "recent tokens are on disk, too"
    settings["kv_cache_dir"] = None
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        assert answers(llm, [turn], params()) == found


def before_the_end_of_a_block() -> list[list[int]]:
    return [prompt(end - back, seed=back) for end in (128, 256) for back in (2, 5, 9, 20)]


def test_drafts_that_cross_the_end_of_a_block_change_no_bit():
    """Some tokens are right and some wrong, so that rows go back into the block before."""
    settings = SETTINGS | {"prefix_cache": False}
    prompts = [{"prompt_token_ids": each} for each in before_the_end_of_a_block()]
    those = [params(40, temperature=0.7, seed=seed) for seed in range(len(prompts))]
    with LLM(DEFAULT_MODEL, speculation="off", **settings) as llm:
        outputs = llm.generate(prompts, those, use_tqdm=False)
        check_drafted(llm, prompts, those, outputs)
        llm._loaded.core.kv.check_integrity()


def test_a_draft_model_has_recent_tokens_too():
    one, settings = params(40), SETTINGS | {"prefix_cache": False}
    with LLM(DEFAULT_MODEL, speculation="off", **settings) as llm:
        without = answers(llm, before_the_end_of_a_block(), one)
    how = {"speculation": "model", "draft_model": DEFAULT_MODEL}
    with LLM(DEFAULT_MODEL, **settings, **how) as llm:
        model = always_draft(llm)
        assert model._kv.layout.groups[-1].by_block
        assert answers(llm, before_the_end_of_a_block(), one) == without
        stats = llm.stats()
        model._kv.check_integrity()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100, "the same rows, the same bits"


def test_several_answers_to_one_prompt_have_the_bits_of_each_alone():
    one, question = {"temperature": 0.8, "seed": 11}, prompt(200, seed=2)
    with LLM(DEFAULT_MODEL, **SETTINGS) as llm:
        together = answers(llm, [question], params(80, n=3, **one))
    with LLM(DEFAULT_MODEL, max_chunk_tokens=33, **SETTINGS) as llm:
        assert answers(llm, [question], params(80, n=3, **one)) == together
    assert len({str(each) for each in together}) == 3


@pytest.mark.parametrize("chunk", [31, 512])
def test_segments_have_blocks_too(chunk):
    """A sequence that is longer than a segment is folded, with or without prefix hits."""
    settings = SETTINGS | {"kvp_segment_tokens": 256, "max_chunk_tokens": chunk}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        found = answers(llm, prompts_of_all_lengths(), params())
    with LLM(DEFAULT_MODEL, **settings) as llm:
        for _ in range(2):
            assert answers(llm, prompts_of_all_lengths(), params()) == found
        assert llm.stats().prefix_hit_tokens > 0
    is_short = [length + 12 <= 256 for length in LENGTHS]
    same = [one == two for one, two in zip(found, expected(), strict=True)]
    assert all(one for one, short in zip(same, is_short, strict=True) if short)


def test_a_sequence_holds_recent_tokens_of_its_last_block_alone():
    from serve.loading.runtime import load_runtime

    runtime = load_runtime(EngineConfig(model=DEFAULT_MODEL, kv_page_bytes=4096, **SETTINGS))
    kv = runtime.kv
    item = kv.open(600)
    recent = kv.layout.groups[-1]
    assert recent.by_block and recent.window == RECENT_BLOCK
    for position in range(600):
        assert kv.grow(item, position + 1, position)
        kv.commit()
        held = len(item.parts[-1].held)
        assert held <= recent.slots_for(RECENT_BLOCK) + 1
        if position % RECENT_BLOCK == 0:
            assert held <= recent.slots_for(1) + 1
    kv.close(item)
    assert kv.num_in_use == 0
    memory = runtime.memory
    del runtime, kv, item
    memory.close()
