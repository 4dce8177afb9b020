"""The engine on the CUDA back end whose decoded tokens read a part of the K/V, in the interpreter
or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from memory.attention.seam import AttentionLayer, AttentionStep
from memory.policies.setting import parse_kv_policy
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.model_source import load_weights, read_source
from serve.loading.precision import resolve_precision
from serve.loading.runtime import load_runtime
from serve.models.progress import LoadProgress
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.logprobs import divergence
from tests.support.memory.selected_reference import SelectedReference
from tests.support.speculation.mixed_requests import answers_of, results
from tests.support.speculation.scripted import draft_by_script, num_accepted

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

NUM_PROMPT, NUM_DECODED = 75, 8
SETTINGS = {
    "backend": "cuda",
    "dtype": "float32",
    "kv_dtype": "int8",
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "kv_cache_bytes": 8 << 20,
}
SMALL, LARGER = "quest:budget=32,least=1", "quest:budget=48,least=1"


def model() -> str:
    return str(checkpoint("llama", "long"))


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


def params(num_tokens: int, **more: object) -> SamplingParams:
    base = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**(base | more))


def answers(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[object]:
    outputs = llm.generate(prompts, params(num_tokens), use_tqdm=False)
    return [(x.outputs[0].token_ids, x.outputs[0].cumulative_logprob) for x in outputs]


def steps() -> list[tuple[int, int]]:
    end = NUM_PROMPT + NUM_DECODED
    return [(0, NUM_PROMPT), *[(i, i + 1) for i in range(NUM_PROMPT, end)]]


def decoded(policy: str, tokens: list[int]) -> torch.Tensor:
    """Returns log-probabilities after each decoded token."""
    settings = SETTINGS | {"max_num_batched_tokens": NUM_PROMPT}
    runtime = load_runtime(EngineConfig(model=model(), kv_policy=policy, **settings))
    target = runtime.kv.open(len(tokens))
    found, device = [], runtime.model.device
    with torch.inference_mode():
        for first, end in steps():
            assert runtime.kv.grow(target, end, first)
            runtime.kv.commit()
            step = AttentionStep(int(first > 0), [target.start], [end - first], [end], [NUM_PROMPT])
            hidden = runtime.model.forward(
                torch.tensor(tokens[first:end], device=device),
                torch.arange(first, end, device=device),
                runtime.attention.plan(step),
            )
            if first:
                logits = runtime.model.logits(hidden)
                found.append(torch.log_softmax(logits, -1).double().cpu())
    runtime.kv.close(target)
    memory = runtime.memory
    del runtime
    memory.close()
    return torch.cat(found)


def reference(policy: str, tokens: list[int]) -> torch.Tensor:
    """Returns the same by slow attention in fp64."""
    config = EngineConfig(model=model(), dtype="float32", backend="cpu")
    weights = load_weights(read_source(config), LoadProgress())
    attention = SelectedReference(weights.attention_layers(), parse_kv_policy(policy))
    found = []
    with torch.inference_mode():
        for first, end in steps():
            attention.is_decoded = first > 0
            ids, positions = torch.tensor(tokens[first:end]), torch.arange(first, end)
            hidden = weights.forward(ids, positions, attention)
            if first:
                found.append(torch.log_softmax(weights.logits(hidden), -1).double())
    return torch.cat(found)


def test_decoded_tokens_have_the_distributions_of_the_reference():
    # in this text no two tiles at the edge have scores that differ by less than 0.2 %
    tokens = text(NUM_PROMPT + NUM_DECODED, seed=4)
    found, wanted, everything = (
        decoded(SMALL, tokens),
        reference(SMALL, tokens),
        decoded("off", tokens),
    )
    error, of_policy = divergence(wanted, found), divergence(wanted, everything)
    assert float(error.mean()) < 0.05 * float(of_policy.mean()), "of another rule"


def test_a_budget_of_everything_gives_the_bits_of_no_policy():
    lengths, num_tokens, found = (20, 50), 5, {}
    prompts = [text(n, seed=n) for n in lengths]
    for policy in ("off", "quest:budget=100%", SMALL):
        with LLM(model(), kv_policy=policy, speculation="off", **SETTINGS) as llm:
            found[policy] = answers(llm, prompts, num_tokens)
            if policy == SMALL:
                held = sum(-(-(n + i) // 16) for n in lengths for i in range(1, num_tokens))
                read = 2 * 2 * (num_tokens - 1)
                assert llm._loaded.selection.counts() == {"read": read, "held": held}
    assert found["quest:budget=100%"] == found["off"]
    assert found[SMALL][0] == found["off"][0], "within the budget"
    assert found[SMALL][1:] != found["off"][1:]


@pytest.mark.small_pages
def test_a_prefix_hit_and_drafts_change_no_token():
    """Bounds lie in the pages that are found, and a rejected draft leaves no trace in them."""
    settings = SETTINGS | {"kv_page_bytes": 4096, "speculation": "off", "max_num_seqs": 16}
    prompts = [{"prompt_token_ids": text(n, seed=3)} for n in (58, 75)]
    those = [params(8, seed=i, temperature=0.7) for i in range(2)]
    with LLM(model(), kv_policy=SMALL, **settings) as llm:
        outputs = llm.generate(prompts, those, use_tqdm=False)
        expected = [each[:4] for each in results(outputs)]
        draft_by_script(llm, answers_of(prompts, outputs), 0.7)
        again = llm.generate(prompts, those, use_tqdm=False)
        assert [each[:4] for each in results(again)] == expected
        assert num_accepted(llm) > 5
        assert llm.stats().prefix_hit_tokens > 0
        assert llm._loaded.selection.num_read < llm._loaded.selection.num_held


def test_a_request_reads_what_its_own_policy_says():
    """Beside others that read more or less, in the same steps; whichever is the engine's own."""
    prompts, found = [{"prompt_token_ids": text(58, seed=3)}] * 3, []
    for policy, own in ((SMALL, (None, LARGER)), (LARGER, (SMALL, None))):
        several = [params(3, kv_policy=one) for one in (*own, "off")]
        with LLM(model(), kv_policy=policy, speculation="off", **SETTINGS) as llm:
            outputs = [x.outputs[0] for x in llm.generate(prompts, several, use_tqdm=False)]
            found.append([x.cumulative_logprob for x in outputs])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3, "each budget reads something else"


@pytest.mark.parametrize("family", ["lfm2", "gpt_oss"])
def test_models_of_other_kinds_select_in_the_layers_that_see_all_keys(family):
    """Beside layers with a state, and with windows and sinks."""
    settings, path = SETTINGS | {"speculation": "off"}, str(checkpoint(family, "long"))
    found = {}
    for policy in ("off", "quest:budget=100%", SMALL):
        with LLM(path, kv_policy=policy, **settings) as llm:
            found[policy] = answers(llm, [text(44, seed=3)], 6)
            if policy == SMALL:
                assert llm._loaded.selection.counts() == {"read": 5 * 2, "held": 4 * 3 + 4}
    assert found["quest:budget=100%"] == found["off"] != found[SMALL]


def test_contexts_above_what_a_program_chooses_from_are_refused():
    from serve.loading.cuda_runtime import kv_layouts

    config = EngineConfig(model=model(), kv_policy=SMALL, **SETTINGS)
    spec = read_source(config).spec
    precision, layers = resolve_precision(config, spec), [AttentionLayer(4, 2, 64, 0.1)]
    assert kv_layouts(config, precision, layers, 524288)[0].bounds == [True]
    with pytest.raises(ConfigError, match="kv_policy on a GPU needs a max_model_len of at most 52"):
        kv_layouts(config, precision, layers, 524289)


def test_models_without_layers_to_select_in_are_refused():
    with pytest.raises(ConfigError, match="kv_policy quest has nothing to select"):
        LLM(str(checkpoint("deepseek_v2", "long")), kv_policy=SMALL, **SETTINGS)
