"""The engine whose decoded tokens read a part of the K/V: by the rule, and with the same bits
however a sequence is computed."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from memory.attention.seam import Attention, AttentionStep
from memory.policies.setting import parse_kv_policy
from ops.cpu import native_library
from serve import LLM
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.loading.model_source import load_weights, read_source
from serve.loading.runtime import load_runtime
from serve.models.progress import LoadProgress
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.logprobs import divergence
from tests.support.memory.selected_reference import SelectedReference
from tests.support.preempted import until_preempted
from tests.support.speculation.scripted import check_drafted
from tests.whole.test_recent_tokens import answers, params, prompt, text

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
QUEST = "quest:budget=25%,least=1"
LENGTHS = (1, 15, 16, 17, 100, 127, 128, 129, 250, 300, 517)
SETTINGS = {"dtype": "int8", "max_model_len": 640, "max_num_seqs": 12}
KINDS = ("int8", "int4")


def prompts_of_all_lengths() -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


@functools.cache
def expected(kv_dtype: str, policy: str) -> list[object]:
    settings = SETTINGS | {"kv_dtype": kv_dtype, "kv_policy": policy}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        return answers(llm, prompts_of_all_lengths(), params(24))


def decoded(kv_policy: str, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Returns log-probabilities after each token but those of the prompt, as the engine's parts
    compute them."""
    config = EngineConfig(
        model=DEFAULT_MODEL, dtype="float32", kv_dtype="int8", max_num_seqs=1, kv_policy=kv_policy
    )
    runtime = load_runtime(config)
    found = []
    with torch.inference_mode():
        item = runtime.kv.open(len(tokens))
        assert runtime.kv.grow(item, len(tokens))
        runtime.kv.commit()
        for first, end in _steps(len(tokens), num_prompt):
            one = int(first > 0)
            step = AttentionStep(one, [item.start], [end - first], [end], [num_prompt])
            attention = runtime.attention.plan(step)
            positions = torch.arange(first, end)
            hidden = runtime.model.forward(torch.tensor(tokens[first:end]), positions, attention)
            if first:
                found.append(torch.log_softmax(runtime.model.logits(hidden), -1).double())
    memory = runtime.memory
    del runtime
    memory.close()
    return torch.cat(found)


def _steps(length: int, num_prompt: int) -> list[tuple[int, int]]:
    return [(0, num_prompt), *[(i, i + 1) for i in range(num_prompt, length)]]


def reference(kv_policy: str, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Returns the same by slow attention in fp64."""
    model = load_weights(
        read_source(EngineConfig(model=DEFAULT_MODEL, dtype="float32")), LoadProgress()
    )
    layers = model.attention_layers()
    ours = SelectedReference(layers, parse_kv_policy(kv_policy))
    attention: Attention = ours
    found = []
    with torch.inference_mode():
        for first, end in _steps(len(tokens), num_prompt):
            ours.is_decoded = first > 0
            ids, positions = torch.tensor(tokens[first:end]), torch.arange(first, end)
            hidden = model.forward(ids, positions, attention)
            if first:
                found.append(torch.log_softmax(model.logits(hidden), -1).double())
    return torch.cat(found)


@pytest.mark.parametrize(
    "policy",
    ["quest:budget=64", pytest.param("quest:budget=12%,least=1", marks=pytest.mark.exhaustive)],
)
def test_decoded_tokens_have_the_distributions_of_the_reference(policy):
    tokens = text(420)
    found, wanted = (which(policy, tokens, 340) for which in (decoded, reference))
    everything = decoded("off", tokens, 340)
    error = divergence(wanted, found)
    of_policy = divergence(wanted, everything)
    assert float(error.mean()) < 0.05 * float(of_policy.mean()), "of another rule"
    assert float(error.median()) < 1e-4
    agree = (wanted.argmax(-1) == found.argmax(-1)).double().mean()
    assert float(agree) > 0.97


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("policy", ["quest:budget=100%", "quest:budget=640"])
def test_a_budget_of_everything_gives_the_bits_of_no_policy(kv_dtype, policy):
    assert expected(kv_dtype, policy) == expected(kv_dtype, "off")


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_small_budget_changes_long_answers_and_no_short_ones(kv_dtype):
    small, whole = (expected(kv_dtype, policy) for policy in ("quest:budget=128", "off"))
    assert small[:5] == whole[:5], "sequences within the budget"
    assert small[-1] != whole[-1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("chunk", [7, 512])
def test_answers_do_not_depend_on_the_chunks(chunk, kv_dtype):
    settings = SETTINGS | {"max_chunk_tokens": chunk, "max_num_batched_tokens": 512}
    settings |= {"kv_dtype": kv_dtype, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        assert answers(llm, prompts_of_all_lengths(), params(24)) == expected(kv_dtype, QUEST)


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_answers_do_not_depend_on_the_sequences_beside_them(kv_dtype):
    settings = SETTINGS | {"kv_dtype": kv_dtype, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        alone = [answers(llm, [one], params(24))[0] for one in prompts_of_all_lengths()]
    assert alone == expected(kv_dtype, QUEST)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("shared", [100, 128, 300])
def test_a_prefix_hit_changes_no_bit(shared, kv_dtype):
    """Bounds travel with the pages, and those of tiles that a hit ends in are written again."""
    first = prompt(420, seed=3)
    prompts = [[*first[:shared], *prompt(40, seed=i)] for i in range(4, 7)]
    settings = SETTINGS | {"kv_page_bytes": 4096, "kv_cache_bytes": 24 << 20}
    settings |= {"kv_dtype": kv_dtype, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        without = [answers(llm, [one], params())[0] for one in (first, *prompts)]
    with LLM(DEFAULT_MODEL, **settings) as llm:
        assert [answers(llm, [one], params())[0] for one in (first, *prompts)] == without
        hits = llm.stats().prefix_hit_tokens
        assert hits >= len(prompts) * (shared - 32)
        assert answers(llm, [first, *prompts], params()) == without
        assert llm.stats().prefix_hit_tokens > hits


def test_a_prompt_comes_from_disk_with_its_bounds(tmp_path):
    settings = SETTINGS | {
        "kv_page_bytes": 4096,
        "kv_cache_bytes": 4 << 20,
        "kv_cache_dir": str(tmp_path),
        "kv_disk_bytes": 64 << 20,
        "kv_policy": QUEST,
    }
    first = prompt(400, seed=8)
    with LLM(DEFAULT_MODEL, **settings) as llm:
        said = answers(llm, [first], params())
    with LLM(DEFAULT_MODEL, **settings) as llm:
        assert answers(llm, [first], params()) == said
        assert llm.stats().disk_loaded_pages > 0
    settings["kv_policy"] = "quest:budget=50%,least=1"  # tokens that read more have other K/V
    with LLM(DEFAULT_MODEL, **settings) as llm:
        answers(llm, [first], params())
        assert llm.stats().disk_loaded_pages == 0


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_drafts_change_no_bit(kv_dtype):
    """Each row of a draft chooses for itself; rejected ones leave no trace in the bounds."""
    settings = SETTINGS | {"prefix_cache": False, "kv_dtype": kv_dtype, "kv_policy": QUEST}
    lengths = (120, 127, 140, 250, 300, 511)
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in lengths]
    those = [params(40, temperature=0.7, seed=seed) for seed in range(len(prompts))]
    with LLM(DEFAULT_MODEL, speculation="off", **settings) as llm:
        outputs = llm.generate(prompts, those, use_tqdm=False)
        check_drafted(llm, prompts, those, outputs)
        llm._loaded.core.kv.check_integrity()


def _scored(output):
    return [(t, of[t].logprob) for t, of in zip(output.token_ids, output.logprobs, strict=True)]


def test_a_request_reads_everything_where_it_says_so():
    """Beside others that select, and after the same text was an answer that selected."""
    question, settings = prompt(300, seed=2), SETTINGS | {"max_model_len": 900}
    with LLM(DEFAULT_MODEL, kv_policy="off", **settings) as llm:
        whole = answers(llm, [question], params(60, kv_policy="off"))
        longer = [*question, *[token for token, _ in whole[0]]]
        then = answers(llm, [longer], params(60))
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **settings) as llm:
        prompts = [{"prompt_token_ids": question}] * 2
        both = llm.generate(prompts, [params(60), params(60, kv_policy="off")], use_tqdm=False)
        chosen, exact = (_scored(one.outputs[0]) for one in both)
        assert exact == whole[0] != chosen
        answers(llm, [longer], params(60))  # now these tokens have K/V of answers that select
        assert answers(llm, [longer], params(60, kv_policy="off")) == then
        assert llm.stats().pages_in_use == 0


def test_several_answers_to_one_prompt_have_the_bits_of_each_alone():
    one, question = {"temperature": 0.8, "seed": 11}, prompt(300, seed=2)
    settings = SETTINGS | {"kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        together = answers(llm, [question], params(80, n=3, **one))
    with LLM(DEFAULT_MODEL, max_chunk_tokens=33, **settings) as llm:
        assert answers(llm, [question], params(80, n=3, **one)) == together
    assert len({str(each) for each in together}) == 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_are_the_same_after_preemption(prefix_cache):
    """Tokens of an answer select when they are computed again, too, many in one step."""
    prompts, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    little = {"kv_cache_bytes": 1050 << 10, "memory_policy": "prompt_only", "max_num_seqs": 4}
    settings = SETTINGS | {"kv_page_bytes": 4096, "prefix_cache": prefix_cache, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        roomy = answers(llm, prompts, one)
    with LLM(DEFAULT_MODEL, **settings | little | {"max_model_len": 420}) as llm:
        assert until_preempted(llm, lambda: answers(llm, prompts, one)) == roomy


@pytest.mark.parametrize(
    ("family", "variant", "kv_dtype"),
    [
        ("gpt_oss", "long", "int8"),
        ("gemma4_text", "long", "int8"),
        ("gemma2", "head-256", "int8"),
        ("llama", "long", "int8"),
        ("gpt_oss", "long", "int4"),
        *[
            pytest.param(*costly, "int4", marks=pytest.mark.exhaustive)
            for costly in (("gemma4_text", "long"), ("gemma2", "head-256"), ("llama", "long"))
        ],
    ],
)
def test_models_of_other_kinds_select_in_the_layers_that_see_all_keys(family, variant, kv_dtype):
    """With windows beside full attention, sinks, caps on scores, and layers that share K/V."""
    prompts = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in (20, 60, 100)]
    settings = {"dtype": "int8", "kv_dtype": kv_dtype, "max_num_seqs": 4, "max_model_len": 160}
    found = {}
    for policy in ("off", "quest:budget=100%", "quest:budget=20%,least=1"):
        path = str(checkpoint(family, variant))
        with LLM(path, **settings, kv_policy=policy, kv_page_bytes=4096) as llm:
            found[policy] = [answers(llm, prompts, params(50)) for _ in range(2)]
    assert found["quest:budget=100%"] == found["off"]
    assert found["quest:budget=20%,least=1"][0] == found["quest:budget=20%,least=1"][1], (
        "with prefix hits"
    )
    if kv_dtype == "int8":  # with int4, all keys of so short sequences are in a row's own block
        assert found["quest:budget=20%,least=1"] != found["off"]


def test_what_is_read_is_counted_and_told(caplog):
    with (
        caplog.at_level(logging.INFO),
        LLM(DEFAULT_MODEL, **SETTINGS, kv_policy="quest:budget=64") as llm,
    ):
        answers(llm, [prompt(320)], params(11))
        counts = llm._loaded.selection.counts()
    assert counts == {"read": 10 * 4, "held": 10 * 21}
    told = [record.message for record in caplog.records if "kv_policy quest" in record.message]
    assert len(told) == 1
    assert "64 tokens" in told[0]


def test_what_cannot_select_is_refused():
    with pytest.raises(ConfigError, match=r"kv_policy quest needs kv_dtype int8 or int4, not fl"):
        LLM(DEFAULT_MODEL, dtype="float32", kv_policy=QUEST)
    with pytest.raises(ConfigError, match=r"kv_policy needs a kvp_segment_tokens"):
        LLM(DEFAULT_MODEL, **SETTINGS, kvp_segment_tokens=256, kv_policy=QUEST)
    with pytest.raises(ConfigError, match=r"kv_policy quest has nothing to select"):
        LLM(str(checkpoint("deepseek_v2", "long")), dtype="int8", kv_dtype="int8", kv_policy=QUEST)
