"""Drafts on the CUDA back end, with Triton's kernels in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.common.scripted_drafts import ScriptedDrafter
from memory.attention.seam import AttentionStep
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.loading import cuda_runtime
from serve.loading.draft_model import load_draft_weights
from serve.models.progress import LoadProgress
from serve.runner.device_forward import DeviceForward
from serve.speculation.speculation import Speculation
from tests.serve.speculation.test_same_tokens import answers_of, results
from tests.support.cuda.late_step_device import LateStepDevice
from tests.support.engine.checkpoints import checkpoint, reference_greedy
from tests.support.speculation.scripted import FreeRows, always_draft, num_accepted

pytestmark = pytest.mark.exhaustive
pytest.importorskip("triton")


def requests():
    prompts = [{"prompt_token_ids": [5 + 3 * i, *range(7, 9 + 5 * i)]} for i in range(3)]
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, repetition_penalty=1.3),
    ]
    return prompts, params


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_drafts_change_no_token(dtype):
    """A step with drafts is launched when all tokens are known, and the next one after it; the
    sequence with penalties has none."""
    settings = {"dtype": dtype, "max_num_seqs": 8, "max_model_len": 64, "kv_cache_bytes": 8 << 20}
    settings |= {"max_num_batched_tokens": 64, "prefix_cache": False, "speculation": "off"}
    with LLM(str(checkpoint("llama")), backend="cuda", **settings) as llm:
        prompts, params = requests()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm._loaded.core
        for rate in (1.0, 0.5):
            drafter = ScriptedDrafter(answers_of(prompts, outputs), rate)
            core._scheduler.drafting = Speculation(drafter, FreeRows(), core.kv, 4, device_rows=8)
            before = num_accepted(llm)
            again = llm.generate(prompts, params, use_tqdm=False)
            assert num_accepted(llm) > before
            assert [r[:4] for r in results(again)] == [r[:4] for r in results(outputs)]
        assert llm.stats().pages_in_use == 0


def test_lookup_is_on_by_default():
    """Steps are launched ahead again when nothing repeats."""
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
    settings |= {"max_num_batched_tokens": 64, "kv_cache_bytes": 8 << 20}
    with LLM(str(checkpoint("llama")), backend="cuda", **settings) as llm:
        drafting = llm._loaded.core._scheduler.drafting
        assert drafting is not None
        prompt = {"prompt_token_ids": [5, 6, 7, 8] * 4 + [5, 6]}
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        first = llm.generate([prompt], params, use_tqdm=False)
        llm._loaded.core._scheduler.drafting = None
        assert results(llm.generate([prompt], params, use_tqdm=False)) == results(first)


DRAFTED = {"max_num_seqs": 10, "max_model_len": 64, "max_num_batched_tokens": 40}


@pytest.mark.parametrize(
    ("target", "draft", "dtype"),
    [
        (("llama", "base"), ("llama", "base"), "float32"),
        (("llama", "base"), ("qwen3", "base"), "int8"),
        (("gemma2", "head-24"), ("deepseek_v3", "yarn"), "float32"),
    ],
)
def test_a_draft_model_changes_no_token(target, draft, dtype):
    """It computes on the target's device, between two of its steps; sequences with penalties have
    no drafts."""
    path, own = str(checkpoint(*target)), str(checkpoint(*draft))
    settings = DRAFTED | {"backend": "cuda", "dtype": dtype, "kv_cache_bytes": 8 << 20}
    prompts, params = requests()
    params = [replace(each, max_tokens=6) for each in params]
    with LLM(path, speculation="off", **settings) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    settings |= {"speculation": "model", "draft_model": own, "max_draft_tokens": 3}
    with LLM(path, **settings) as llm:
        model = always_draft(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [r[:4] for r in results(outputs)] == [r[:4] for r in expected]
        stats = llm.stats()
        assert stats.num_draft_tokens >= 4
        assert target != draft or stats.num_accepted_tokens >= 4
        assert stats.pages_in_use == stats.draft_pages_in_use == 0
        model._kv.check_integrity()


def test_a_device_that_computes_late(monkeypatch):
    """Nothing that the device reads late is overwritten or freed by the other model's steps."""
    device = LateStepDevice(delay_s=0.005)
    monkeypatch.setattr(cuda_runtime, "make_step_device", lambda device_of: device)
    llama = str(checkpoint("llama"))
    prompts = [{"prompt_token_ids": list(range(5 + i, 12 + 3 * i))} for i in range(2)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings = DRAFTED | {"backend": "cuda", "dtype": "float32", "kv_cache_bytes": 8 << 20}
    settings |= {"speculation": "model", "draft_model": llama, "max_draft_tokens": 3}
    with LLM(llama, **settings) as llm:
        always_draft(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().num_accepted_tokens >= 4
        assert llm.stats().pages_in_use == llm.stats().draft_pages_in_use == 0
    device.stop()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_greedy(checkpoint("llama"), prompt["prompt_token_ids"], 8)
        assert output.outputs[0].token_ids == expected


def test_both_models_share_the_memory():
    settings = DRAFTED | {"backend": "cuda", "kv_cache_bytes": 1 << 20, "kv_page_bytes": 4096}
    llama = str(checkpoint("llama"))
    with LLM(llama, speculation="model", draft_model=llama, **settings) as llm:
        model, own = always_draft(llm), llm._loaded.core.kv
        assert own.num_pages * own.page_bytes == 1 << 19
        assert model._kv.num_pages * model._kv.page_bytes == 1 << 19


def test_steps_of_a_device_are_computed_in_graphs_where_they_fit():
    """Logits are those of the same model on processors, of rows in a graph and of others, for
    sequences that decode beside prompts."""
    path = str(checkpoint("llama"))
    settings = DRAFTED | {"dtype": "float32", "kv_cache_bytes": 8 << 20}
    found = []
    for backend in ("cpu", "cuda"):
        config = EngineConfig(path, speculation="model", draft_model=path, **settings)
        config = replace(config, backend=backend)
        weights = load_draft_weights(config, LoadProgress())
        runtime, compute = weights.with_kv(config, _Pages())
        if isinstance(compute, DeviceForward):
            compute.warm_up()
            assert len(compute._graphs) > 3
        kv = runtime.kv
        first, second = kv.open(20, None), kv.open(20, None)
        assert kv.grow(first, 20, 0) and kv.grow(second, 20, 0)
        kv.commit([first, second])
        starts = [first.start, second.start]
        made = [
            compute([5, 6, 7], [0, 1, 2], AttentionStep(0, starts[:1], [3], [3]), []),
            compute([8, 9], [3, 0], AttentionStep(1, starts, [1, 1], [4, 1]), [0, 1]),
            compute([3, 4, 5], [4, 1, 2], AttentionStep(1, starts, [1, 2], [5, 3]), [0, 2]),
        ]
        assert made[0] is None
        found.append(torch.cat(made[1:]))
        for each in (first, second):
            kv.close(each)
        runtime.memory.close()
    assert torch.allclose(found[0], found[1], atol=2e-4)


class _Pages:
    num_pages, page_bytes = 1024, 4096
