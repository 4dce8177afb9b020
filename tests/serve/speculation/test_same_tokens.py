"""Drafts change no token and no log-probability: any model, any precision, mixed requests."""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import pytest

from serve import LLM
from tests.support.engine.checkpoints import LONG_VARIANTS, VARIANTS, checkpoint
from tests.support.engine.variants import mamba, states
from tests.support.engine.variants.table import is_first
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.nodes.served_nodes import MIB, nodes
from tests.support.profile import every_day
from tests.support.speculation.mixed_requests import answers_of, requests, results
from tests.support.speculation.scripted import check_drafted, draft_by_script, num_accepted

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ("float32", "int8", "bfloat16", "int4")
FIRST = [variant for variant in VARIANTS if is_first(variant)]
OTHERS = [variant for variant in FIRST if variant.family in ("llama", "gemma2", "olmoe")]
CASES = [*product(FIRST, ("float32", "int8")), *product(OTHERS, ("bfloat16", "int4"))]
LLAMA = [i for i, (variant, _) in enumerate(CASES) if variant.family == "llama"]
OFTEN = [
    i
    for i, (variant, dtype) in enumerate(CASES)
    if variant.family in ("gemma2", "olmoe", "deepseek_v3", "llama4_text", "lfm2", "qwen3_5_text")
    and dtype == "int8"
]
# records have no room for drafts where speculation is off
WITH_STATES = {variant.family for variant in (*states.VARIANTS, *mamba.VARIANTS)}


def check(
    path: str, count: int, most: int, elsewhere: dict[str, Any] | None = None, **settings: Any
) -> None:
    """Computes the same requests without drafts, with right ones, and with some wrong ones.
    elsewhere: settings of an engine that is to give the same answers with drafts only. Prompts are
    not cut into chunks, on which the last bits of plain K/V depend."""
    prompts, params = requests(300, count, most)
    settings |= {"prefix_cache": False, "speculation": "off", "max_num_batched_tokens": 600}
    with LLM(path, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if elsewhere is None:
            check_drafted(llm, prompts, params, outputs)
    if elsewhere is not None:
        settings |= {"speculation": "lookup"} | elsewhere
        with LLM(path, **settings) as llm:
            assert llm._loaded.core._scheduler.drafting is not None
            check_drafted(llm, prompts, params, outputs)


@pytest.mark.parametrize(("variant", "dtype"), every_day([*LLAMA, *OFTEN], CASES), ids=str)
def test_every_family(variant, dtype):
    path = str(checkpoint(variant.family, variant.name))
    there: dict[str, Any] | None = {} if variant.family in WITH_STATES else None
    check(path, 14, 30, there, dtype=dtype, max_num_seqs=5, max_model_len=160)


@pytest.mark.parametrize(
    ("variant", "dtype"), every_day([1], list(product(LONG_VARIANTS, DTYPES))), ids=str
)
def test_behind_windows(variant, dtype):
    """Pages behind a window are released, and a chunk's end comes within a draft."""
    path = str(checkpoint(variant.family, variant.name))
    check(path, 6, 150, dtype=dtype, max_num_seqs=4, kv_page_bytes=4096)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_across_records_of_states(family, dtype):
    """Answers pass the ends of several records, whose snapshots later requests begin with."""
    path = str(checkpoint(family, "long"))
    check(path, 8, 200, {}, dtype=dtype, max_num_seqs=4, max_model_len=600)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_on_ranks(thread_workers, grid, dtype):  # noqa: F811
    tensor, stages = grid
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    check(str(checkpoint("llama")), 10, 30, ranks, dtype=dtype, max_num_seqs=5, max_model_len=160)


@pytest.mark.parametrize("partition", ["head", "request"])
def test_on_memory_nodes(partition, tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        there = {"memory_nodes": urls, "memory_partition": partition, "kv_cache_bytes": 16 * MIB}
        check(
            str(checkpoint("llama")), 10, 30, there, dtype="int8", max_num_seqs=5, max_model_len=160
        )


def test_states_beside_memory_nodes(tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        there = {"memory_nodes": urls, "memory_partition": "request", "kv_cache_bytes": 16 * MIB}
        path = str(checkpoint("qwen3_5_text", "long"))
        check(path, 8, 200, there, dtype="int8", max_num_seqs=4, max_model_len=600)


def test_over_segments(tmp_path):
    """Drafts cross the ends of segments, which holders have."""
    lengths = {"max_model_len": 600, "kvp_segment_tokens": 128}
    with nodes("inproc", 2, tmp_path) as urls:
        path, there = str(checkpoint("llama", "long")), {"kvp": urls}
        check(path, 8, 200, there, dtype="int8", max_num_seqs=4, **lengths)


@pytest.mark.parametrize(
    ("model", "dtype"), [(("llama",), "int8"), (("llama",), "float32"), (("lfm2", "convs"), "int8")]
)
def test_steps_that_fail(model, dtype, monkeypatch):
    """Every fourth step fails before or after it is computed, and is computed again."""
    settings = {"max_num_seqs": 5, "max_model_len": 160, "prefix_cache": False}
    with LLM(str(checkpoint(*model)), dtype=dtype, **settings) as llm:
        llm._loaded.core._scheduler.drafting = None
        prompts, params = requests(300, 10, 30)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        draft_by_script(llm, answers_of(prompts, outputs), 0.8)
        runner, numbers = llm._loaded.core._executor._runner, itertools.count()
        run = runner.run

        def failing(plan, launched):
            number = next(numbers)
            if number % 8 == 3 and len(plan.sequences) > 1:
                raise RuntimeError("injected before")
            result = run(plan, launched)
            if number % 8 == 7 and len(plan.sequences) > 1:
                raise RuntimeError("injected after")
            return result

        monkeypatch.setattr(runner, "run", failing)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == results(outputs)
        assert num_accepted(llm) > 50
        assert llm.stats().pages_in_use == 0
