"""An engine whose rows of answers select what memory nodes read: the tokens and the bits of the
same policy over its own memory, however a sequence is computed."""

from __future__ import annotations

import contextlib
import functools

import pytest

from memory.nodes.attach import AttachRequest
from ops.cpu import native_library
from serve import LLM
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.preempted import until_preempted
from tests.support.profile import every_day
from tests.support.speculation.scripted import check_drafted
from tests.whole.nodes.test_engine_nodes import AlwaysSplits
from tests.whole.nodes.test_states_on_nodes import lose_a_node
from tests.whole.policies.test_selected_engine import QUEST, SETTINGS, prompts_of_all_lengths
from tests.whole.test_recent_tokens import answers, params, prompt

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
KINDS = ("int8", "int4")


@functools.cache
def local_answers(kv_dtype="int8", kv_policy=QUEST, model=DEFAULT_MODEL):
    """Returns the answers over this machine's memory, where int4 K/V has one store as on nodes."""
    settings = SETTINGS | {"kv_dtype": kv_dtype, "kv_policy": kv_policy}
    with one_store(), LLM(model, prefix_cache=False, **settings) as llm:
        return answers(llm, prompts_of_all_lengths(), params(24))


@contextlib.contextmanager
def far_engine(urls, folder, model=DEFAULT_MODEL, **settings):
    secret = {"memory_node_key_file": key_file(folder)} if urls[0].startswith("tcp") else {}
    usual = SETTINGS | {"kv_cache_bytes": 16 * MIB, "kv_policy": QUEST}
    with LLM(model, memory_nodes=urls, **(usual | secret | settings)) as llm:
        yield llm
        assert llm.stats().pages_in_use == 0
        llm._loaded.core.kv.check_integrity()


@pytest.mark.parametrize(
    ("scheme", "count", "partition", "kv_dtype", "more"),
    every_day(
        (0, 1, 2, 3),
        [
            ("inproc", 2, "head", "int8", {}),
            ("shm", 2, "request", "int8", {}),
            ("tcp", 1, "auto", "int8", {"memory_prefill": "remote"}),
            ("inproc", 2, "head", "int4", {"memory_prefill": "remote"}),
            ("tcp", 2, "request", "int4", {}),
            ("shm", 2, "head", "int8", {}),
            ("inproc", 3, "request", "int8", {"max_chunk_tokens": 33}),
        ],
    ),
)
def test_answers_have_the_bits_of_the_local_engine(
    scheme, count, partition, kv_dtype, more, tmp_path
):
    """So the tiles are those that the local engine chooses, which has the tokens of the reference
    (tests/whole/policies)."""
    with (
        nodes(scheme, count, tmp_path) as urls,
        far_engine(
            urls,
            tmp_path,
            memory_partition=partition,
            kv_dtype=kv_dtype,
            prefix_cache=False,
            **more,
        ) as llm,
    ):
        assert answers(llm, prompts_of_all_lengths(), params(24)) == local_answers(kv_dtype)
    assert local_answers(kv_dtype)[-1] != local_answers(kv_dtype, "off")[-1]


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_budget_of_everything_gives_the_bits_of_no_policy(kv_dtype, tmp_path):
    found = []
    with nodes("inproc", 2, tmp_path) as urls:
        for kv_policy in ("quest:budget=100%", "off"):
            with far_engine(urls, tmp_path, kv_dtype=kv_dtype, kv_policy=kv_policy) as llm:
                found.append(answers(llm, prompts_of_all_lengths(), params(24)))
    assert found[0] == found[1]
    assert found[0] == local_answers(kv_dtype, "off")


@pytest.mark.parametrize("partition", ["head", "request"])
def test_a_prefix_hit_changes_no_bit(partition, tmp_path):
    """Bounds lie in the nodes' pages, those of tiles that a hit ends in are written again."""
    first = prompt(420, seed=3)
    prompts = [first, *([*first[:shared], *prompt(40, seed=shared)] for shared in (100, 128, 300))]
    with LLM(DEFAULT_MODEL, prefix_cache=False, kv_policy=QUEST, **SETTINGS) as llm:
        without = [answers(llm, [one], params())[0] for one in prompts]
    with (
        nodes("inproc", 2, tmp_path) as urls,
        far_engine(urls, tmp_path, memory_partition=partition) as llm,
    ):
        assert [answers(llm, [one], params())[0] for one in prompts] == without
        hits = llm.stats().prefix_hit_tokens
        assert hits > 0
        assert answers(llm, prompts, params()) == without
        assert llm.stats().prefix_hit_tokens > hits


def test_several_answers_to_one_prompt_have_the_bits_of_the_local_engine(tmp_path):
    """They share the pages of their prompt, and its last one is copied for each."""
    question, several = prompt(300, seed=2), params(60, n=3, temperature=0.8, seed=11)
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS) as llm:
        expected = answers(llm, [question], several)
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path) as llm:
        assert answers(llm, [question], several) == expected
    assert len({str(each) for each in expected}) == 3


@pytest.mark.parametrize("prefill", ["local", "remote"])
def test_answers_are_the_same_after_preemption(prefill, tmp_path):
    """Tokens of an answer select when they are computed again, too, many in one step."""
    prompts, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS) as llm:
        expected = answers(llm, prompts, one)
    little = {"memory_node_bytes": 550 << 10, "memory_policy": "prompt_only", "max_num_seqs": 4}
    little |= {"max_model_len": 420, "memory_prefill": prefill, "memory_partition": "head"}
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **little) as llm:
        assert until_preempted(llm, lambda: answers(llm, prompts, one)) == expected


@pytest.mark.parametrize(
    ("partition", "count", "is_gone"),
    every_day((0, 1), [("head", 2, False), ("request", 1, True), ("request", 2, True)]),
)
def test_a_lost_node_costs_a_pause_and_no_token(partition, count, is_gone, tmp_path, monkeypatch):
    """Without any node the K/V is in this machine's memory, where rows select, too."""
    with (
        nodes("inproc", count, tmp_path) as urls,
        far_engine(urls, tmp_path, memory_partition=partition) as llm,
    ):
        lose_a_node(monkeypatch, llm, 90, is_gone=is_gone)
        assert answers(llm, prompts_of_all_lengths(), params(24)) == local_answers()
        stats = llm.stats()
    assert stats.memory_nodes_lost == 1
    assert stats.recomputed_sequences > 0


@pytest.mark.parametrize("partition", every_day((1,), ["head", "request"]))
def test_drafts_change_no_bit(partition, tmp_path):
    """Each row of a draft chooses for itself."""
    lengths = (120, 127, 140, 250, 300, 511)
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in lengths]
    those = [params(40, temperature=0.7, seed=seed) for seed in range(len(prompts))]
    settings = {"prefix_cache": False, "kv_policy": QUEST, "speculation": "off"}
    with LLM(DEFAULT_MODEL, **SETTINGS, **settings) as llm:
        outputs = llm.generate(prompts, those, use_tqdm=False)
    settings |= {"speculation": "lookup", "memory_partition": partition}
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **settings) as llm:
        llm._loaded.core._scheduler.drafting = None
        check_drafted(llm, prompts, those, outputs)


def test_a_request_reads_everything_where_it_says_so(tmp_path):
    """Beside others that select, in the same steps."""
    prompts = [{"prompt_token_ids": prompt(300, seed=2)}] * 2
    several = [params(60), params(60, kv_policy="off")]
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS) as llm:
        expected = [o.outputs[0] for o in llm.generate(prompts, several, use_tqdm=False)]
    assert expected[0].token_ids != expected[1].token_ids
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, several, use_tqdm=False)]
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_two_microbatches_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.runner.runner.LearnedMicrobatches", AlwaysSplits)
    AlwaysSplits.num_split = 0
    with (
        nodes("inproc", 2, tmp_path) as urls,
        far_engine(urls, tmp_path, memory_partition="request") as llm,
    ):
        assert answers(llm, prompts_of_all_lengths(), params(24)) == local_answers()
        assert AlwaysSplits.num_split > llm.stats().num_steps / 2


@pytest.mark.parametrize(
    ("family", "variant", "partition"),
    every_day(
        (0,),
        [
            ("gpt_oss", "long", "head"),
            ("gemma4_text", "long", "request"),
            ("qwen3_5_text", "long", "request"),
        ],
    ),
)
def test_layers_of_other_kinds_read_everything(family, variant, partition, tmp_path):
    """Windows and sinks, shared K/V, and states beside layers that see all keys."""
    prompts = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in (20, 60, 100)]
    settings = {"dtype": "int8", "max_num_seqs": 4, "max_model_len": 160, "kv_dtype": "int8"}
    model = str(checkpoint(family, variant))
    found = []
    for kv_policy in ("off", "quest:budget=20%,least=1"):
        with LLM(model, **settings, kv_policy=kv_policy) as llm:
            found.append(answers(llm, prompts, params(50)))
    whole, expected = found
    assert whole != expected
    settings |= {"memory_partition": partition, "kv_policy": kv_policy}
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, model, **settings) as llm:
        assert answers(llm, prompts, params(50)) == expected


def test_what_is_read_is_counted(tmp_path):
    """Once for all layers and nodes, as in local memory."""
    policy = {"kv_policy": "quest:budget=64", "speculation": "off"}
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **policy) as llm:
        answers(llm, [prompt(320)], params(11))
        counts = llm._loaded.selection.counts()
    assert counts == {"read": 10 * 4, "held": 10 * 21}


def test_what_cannot_select_is_refused(tmp_path):
    far = {"memory_nodes": ["inproc://none"], "kv_policy": QUEST}
    with pytest.raises(ConfigError, match=r"kv_policy quest needs kv_dtype int8 or int4, not fl"):
        LLM(DEFAULT_MODEL, dtype="float32", **far)
    with pytest.raises(ConfigError, match=r"kv_policy quest with memory_nodes needs the cpu"):
        LLM(DEFAULT_MODEL, backend="cuda", dtype="int8", kv_dtype="int8", **far)
    with pytest.raises(ConfigError, match=r"memory_nodes cannot be used with kv_policy h2o"):
        LLM(DEFAULT_MODEL, **SETTINGS, **far | {"kv_policy": "h2o:budget=25%"})


def test_a_node_of_an_earlier_version_is_refused(tmp_path, monkeypatch):
    """It ignores the policy and would read everything."""
    from_json = AttachRequest.from_json.__func__

    def without_policy(cls, content):
        content.pop("kv_policy", None)
        return from_json(cls, content)

    monkeypatch.setattr(AttachRequest, "from_json", classmethod(without_policy))
    with (
        nodes("inproc", 1, tmp_path) as urls,
        pytest.raises(ConfigError, match=r"does not know kv_policy quest: it is of an earlier ver"),
        far_engine(urls, tmp_path),
    ):
        pass
