"""Models whose layers have states on the CUDA back end, with Triton's kernels in the interpreter or
on a GPU: chunks, prefix hits, preemption, forks, and steps that fail or wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch

from serve import LLM, SamplingParams
from serve.errors import ConfigError
from serve.loading import cuda_runtime
from serve.structured.token_mask import Matcher
from serve.structured_output import StructuredOutput
from tests.support.cuda.late_step_device import LateStepDevice
from tests.support.engine.checkpoints import checkpoint, reference_greedy
from tests.whole.cuda.test_cuda_engine import NUM_TOKENS, greedy, prompts_of

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

INTERVAL = 64  # of so small states
PROMPT = [(7 * i) % 290 + 3 for i in range(70)]


def cuda_llm(family: str, name: str = "long", **settings: object) -> LLM:
    base = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 96, "kv_cache_bytes": 8 << 20}
    base["max_num_batched_tokens"] = 40  # the start computes the largest step
    return LLM(str(checkpoint(family, name)), backend="cuda", **(base | settings))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("lfm2", "convs"),
        ("lfm2", "bias"),
        ("qwen3_5_text", "net"),
        ("qwen3_5_text", "odd"),
    ],
)
def test_greedy_tokens_equal_transformers(family, name):
    """The prompts run together in chunks, beside a sampled request."""
    prompts = prompts_of(300, seed=len(family + name))
    params = [greedy(), greedy(temperature=0.9, seed=3, top_p=0.8), greedy()]
    with cuda_llm(family, name, max_num_batched_tokens=20, max_model_len=64) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    path = checkpoint(family, name)
    for i in (0, 2):
        expected = reference_greedy(path, prompts[i], NUM_TOKENS)
        assert outputs[i].outputs[0].token_ids == expected, f"prompt {i}"


@pytest.mark.small_pages
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_prefix_hit_and_forks_begin_with_the_states_of_a_prompt(family):
    """The hit ends with a record; the answers of n > 1 are those of the CPU."""
    drawn = SamplingParams(temperature=1.0, max_tokens=4, seed=3, n=3, ignore_eos=True)
    path = checkpoint(family, "long")
    with cuda_llm(family) as llm:
        assert llm._loaded.core.kv.layout.groups[-1].tile_tokens == INTERVAL
        first = llm.generate([PROMPT], greedy(), use_tqdm=False)[0].outputs[0].token_ids
        assert llm.stats().prefix_hit_tokens == 0
        again = llm.generate([PROMPT], greedy(), use_tqdm=False)[0].outputs[0].token_ids
        assert llm.stats().prefix_hit_tokens == INTERVAL
        forks = llm.generate([PROMPT], drawn, use_tqdm=False)[0].outputs
        assert llm.stats().pages_in_use == 0
        llm._loaded.core.kv.check_integrity()
    assert first == again == reference_greedy(path, PROMPT, NUM_TOKENS)
    with LLM(str(path), backend="cpu", dtype="float32", max_model_len=96) as llm:
        expected = llm.generate([PROMPT], drawn, use_tqdm=False)[0].outputs
    assert [x.token_ids for x in forks] == [x.token_ids for x in expected]
    assert len({tuple(x.token_ids) for x in forks}) > 1


@pytest.mark.small_pages
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_preempted_sequences_give_the_same_tokens(family):
    """Two prompts fit, but not the K/V and the records of their last tokens."""
    prompts = [PROMPT[:60], PROMPT[5:65]]
    settings = {"memory_policy": "prompt_only", "max_model_len": 72, "max_num_seqs": 2}
    with cuda_llm(family, kv_cache_bytes=1 << 20, **settings) as llm:
        kv = llm._loaded.core.kv
        num_bytes = (2 * kv.layout.pages_for(60) + 2) * kv.page_bytes
    with cuda_llm(family, kv_cache_bytes=num_bytes, **settings) as llm:
        outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(
            checkpoint(family, "long"), prompt, 12
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStepDevice]:
    made = LateStepDevice(delay_s=0.01)
    monkeypatch.setattr(cuda_runtime, "make_step_device", lambda device: made)
    yield made
    made.stop()


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels must be interpreted")


@interpreted
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_step_that_fails_when_the_next_is_launched_ends_no_request(family, device):
    """It has changed no state, but the next one has, with what was left on the device."""
    failures = iter([False, False, False, True])

    def before(number: int) -> None:
        if next(failures, False):
            raise RuntimeError("a device error")

    prompts = [PROMPT[:9], PROMPT[3:7]]
    with cuda_llm(family) as llm:
        device.before = before
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        assert llm.stats().num_preemptions == 2
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(
            checkpoint(family, "long"), prompt, 6
        )


@interpreted
def test_a_step_waits_for_late_masks(device, monkeypatch):
    """A row whose mask is late could not be computed again."""
    original = Matcher.fill

    def slow(self, bits):
        time.sleep(0.05)
        original(self, bits)

    monkeypatch.setattr(Matcher, "fill", slow)
    masked = greedy(6, structured=StructuredOutput("regex", "[ab]c"))
    with cuda_llm("lfm2") as llm:
        outputs = llm.generate([PROMPT[:9], PROMPT[3:7]], [masked, greedy(6)], use_tqdm=False)
        alone = llm.generate([PROMPT[:9]], masked, use_tqdm=False)[0].outputs[0]
        assert llm.stats().pages_in_use == 0
    assert re.fullmatch("[ab]c", outputs[0].outputs[0].text)
    assert outputs[0].outputs[0].token_ids == alone.token_ids
    expected = reference_greedy(checkpoint("lfm2", "long"), PROMPT[3:7], 6)
    assert outputs[1].outputs[0].token_ids == expected


@interpreted
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_captured_steps_are_launched_again_for_other_rows(family, device):
    with cuda_llm(family, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32) as llm:
        runner = llm._loaded.core._runner
        runner.warm_up()
        assert set(runner._graphs) == set(runner._shapes.captured)
        used: list[int] = []
        for shape, graph in list(runner._graphs.items()):
            runner._graphs[shape] = lambda g=graph, s=shape: (used.append(s.rows), g())
        output = llm.generate([PROMPT[:5]], greedy(), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == reference_greedy(checkpoint(family, "long"), PROMPT[:5], NUM_TOKENS)
    assert used == [16] + [1] * (NUM_TOKENS - 1)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"speculation": "mtp"}, "speculation mtp"),
        ({"memory_nodes": "inproc://absent"}, "memory_nodes"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_what_has_no_states_is_refused_by_name(settings, what):
    with pytest.raises(ConfigError, match=what):
        cuda_llm("qwen3_5_text", **settings)


def test_a_draft_model_with_states_is_refused_by_name():
    path = str(checkpoint("lfm2", "long"))
    with pytest.raises(ConfigError, match="draft_model: the layers of lfm2 have states"):
        LLM(path, backend="cuda", dtype="float32", speculation="model", draft_model=path)
