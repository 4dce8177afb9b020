"""An engine whose rows of answers choose among the tiles of all memory nodes, each of which has
some tokens of every sequence (memory_partition sequence): the tokens of the same policy over its
own memory, however a sequence is computed. Results are merged, so their last bits differ."""

from __future__ import annotations

import functools
import itertools

import pytest

from memory.nodes.server.node_stripes import StripedQueries
from memory.nodes.split_plan import ChoosingPlan
from ops.cpu import native_library
from serve import LLM
from serve.config import DEFAULT_MODEL
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import nodes
from tests.support.preempted import until_preempted
from tests.support.profile import every_day
from tests.support.speculation.mixed_requests import answers_of
from tests.support.speculation.scripted import draft_by_script, num_accepted
from tests.whole.nodes.test_engine_nodes import AlwaysSplits
from tests.whole.nodes.test_selected_nodes import far_engine
from tests.whole.nodes.test_states_on_nodes import unreachable
from tests.whole.policies import test_selected_engine
from tests.whole.policies.test_request_policies import said
from tests.whole.policies.test_selected_engine import QUEST, prompts_of_all_lengths
from tests.whole.test_recent_tokens import answers, params, prompt

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SETTINGS = test_selected_engine.SETTINGS | {"dtype": "float32", "kv_dtype": "int8"}
"""In float32, since int8 products make much of the last bits in which merged results differ."""
SEQUENCE = {"memory_partition": "sequence", "dtype": "float32", "kv_dtype": "int8"}
MOST_OFF = 0.15
"""Of a log-probability. Other tiles, or all, change it more."""


@functools.cache
def local_answers(kv_dtype="int8", kv_policy=QUEST):
    """Returns the answers over this machine's memory, where int4 K/V has one store as on nodes."""
    settings = SETTINGS | {"kv_dtype": kv_dtype, "kv_policy": kv_policy}
    with one_store(), LLM(DEFAULT_MODEL, prefix_cache=False, **settings) as llm:
        return answers(llm, prompts_of_all_lengths(), params(24))


def is_close(found, expected):
    """Returns whether answers have the same tokens, and log-probabilities that are close."""
    pairs = [
        (one, other)
        for some, others in zip(found, expected, strict=True)
        for one, other in zip(some, others, strict=True)
    ]
    return all(one[0] == other[0] and abs(one[1] - other[1]) < MOST_OFF for one, other in pairs)


@pytest.mark.parametrize(
    ("scheme", "count", "kv_dtype", "more"),
    every_day(
        (0, 1),
        [
            ("inproc", 2, "int8", {}),
            ("shm", 3, "int8", {"memory_prefill": "remote"}),
            ("tcp", 2, "int8", {"memory_prefill": "remote"}),
            ("inproc", 2, "int4", {}),
            ("inproc", 4, "int8", {"max_chunk_tokens": 33}),
            ("tcp", 1, "int8", {}),
        ],
    ),
)
def test_answers_have_the_tokens_of_the_local_engine(scheme, count, kv_dtype, more, tmp_path):
    settings = SEQUENCE | {"kv_dtype": kv_dtype, "prefix_cache": False}
    with (
        nodes(scheme, count, tmp_path) as urls,
        far_engine(urls, tmp_path, **settings, **more) as llm,
    ):
        found = answers(llm, prompts_of_all_lengths(), params(24))
        counts = llm._loaded.selection.counts()
    assert is_close(found, local_answers(kv_dtype))
    assert not is_close(found, local_answers(kv_dtype, "off"))
    assert counts["read"] < counts["held"]


def test_a_budget_of_everything_gives_the_bits_of_no_policy(tmp_path):
    found = []
    with nodes("inproc", 2, tmp_path) as urls:
        for kv_policy in ("quest:budget=100%", "off"):
            with far_engine(urls, tmp_path, **SEQUENCE, kv_policy=kv_policy) as llm:
                found.append(answers(llm, prompts_of_all_lengths(), params(24)))
    assert found[0] == found[1]


def test_a_row_may_read_its_own_tile_alone(tmp_path):
    """So one node has nothing to read, and no list has a tile."""
    policy = "quest:budget=1,least=1"
    with (
        nodes("inproc", 2, tmp_path) as urls,
        far_engine(urls, tmp_path, **SEQUENCE, kv_policy=policy) as llm,
    ):
        found = answers(llm, prompts_of_all_lengths(), params(24))
    assert is_close(found, local_answers("int8", policy))


def test_a_prefix_hit_changes_no_token(tmp_path):
    first = prompt(420, seed=3)
    prompts = [first, *([*first[:shared], *prompt(40, seed=shared)] for shared in (100, 300))]
    with LLM(DEFAULT_MODEL, prefix_cache=False, kv_policy=QUEST, **SETTINGS) as llm:
        without = [answers(llm, [one], params())[0] for one in prompts]
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **SEQUENCE) as llm:
        assert is_close([answers(llm, [one], params())[0] for one in prompts], without)
        assert llm.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("prefill", every_day((0,), ["local", "remote"]))
def test_answers_have_the_same_tokens_after_preemption(prefill, tmp_path):
    """Tokens of an answer choose when they are computed again, too, many in one step."""
    prompts, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS) as llm:
        expected = answers(llm, prompts, one)
    little = {"memory_node_bytes": 550 << 10, "memory_policy": "prompt_only", "max_num_seqs": 4}
    little |= {"max_model_len": 420, "memory_prefill": prefill} | SEQUENCE
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **little) as llm:
        assert is_close(until_preempted(llm, lambda: answers(llm, prompts, one)), expected)


def lose_a_node(monkeypatch, llm, at_choice, *, is_gone=False):
    """Ends the connection to the first node when rows are about to choose."""
    choose, counter = ChoosingPlan.choose, itertools.count()
    links = llm._loaded.core._recovery.nodes

    def cut_off_once(plan, layer):
        if next(counter) == at_choice:
            links.connect = unreachable if is_gone else links.connect
            links.partitions[0].links[0].endpoint.close()
        return choose(plan, layer)

    monkeypatch.setattr(ChoosingPlan, "choose", cut_off_once)


@pytest.mark.parametrize(
    ("count", "is_gone"), every_day((0, 1), [(2, False), (1, True), (2, True)])
)
def test_a_lost_node_costs_a_pause_and_no_token(count, is_gone, tmp_path, monkeypatch):
    """Between its q and the choice. Without any node the K/V is in this machine's memory, where
    rows choose, too."""
    with nodes("inproc", count, tmp_path) as urls, far_engine(urls, tmp_path, **SEQUENCE) as llm:
        lose_a_node(monkeypatch, llm, 30, is_gone=is_gone)
        found = answers(llm, prompts_of_all_lengths(), params(24))
        stats = llm.stats()
    assert is_close(found, local_answers())
    assert stats.memory_nodes_lost == 1
    assert stats.recomputed_sequences > 0


def test_a_node_that_fails_after_its_lists_is_lost(tmp_path, monkeypatch):
    attend_listed, failures = StripedQueries.attend_listed, []

    def failing(self, layer, q, number, lists, counts):
        if not failures and layer == 1:
            failures.append(layer)
            raise OSError("no memory")
        return attend_listed(self, layer, q, number, lists, counts)

    monkeypatch.setattr(StripedQueries, "attend_listed", failing)
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **SEQUENCE) as llm:
        found = answers(llm, prompts_of_all_lengths(), params(24))
        assert llm.stats().memory_nodes_lost == 1
    assert failures and is_close(found, local_answers())


def test_drafts_change_no_token(tmp_path):
    """Each row of a draft chooses for itself, among tiles that earlier ones complete, too."""
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in (120, 127, 250)]
    those = [params(40)] * len(prompts)
    settings = {"prefix_cache": False, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, **SETTINGS, **settings, speculation="off") as llm:
        expected = llm.generate(prompts, those, use_tqdm=False)
    settings |= {"speculation": "lookup"} | SEQUENCE
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **settings) as llm:
        llm._loaded.core._scheduler.drafting = None
        draft_by_script(llm, answers_of(prompts, expected), 0.7)
        found = llm.generate(prompts, those, use_tqdm=False)
        assert num_accepted(llm) > 20
    assert tokens_of(found) == tokens_of(expected)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


BUDGETS = ("off", "quest:budget=64", "quest:budget=50%,least=1", None)


@functools.cache
def budget_answers():
    """Returns what engines with these policies answer to a question over their own memory."""
    found = []
    for policy in BUDGETS:
        with LLM(DEFAULT_MODEL, kv_policy=policy or QUEST, **SETTINGS) as llm:
            found += answers(llm, [prompt(300, seed=2)], params(24))
    return found


@pytest.mark.parametrize(
    ("count", "more"),
    every_day(
        (0,),
        [
            (2, {}),
            (3, {"memory_prefill": "remote"}),
            (1, {"max_chunk_tokens": 33}),
        ],
    ),
)
def test_requests_have_the_tokens_of_their_own_budgets(count, more, tmp_path):
    """Beside others that choose more tiles, fewer, or none, in the same steps."""
    expected = budget_answers()
    assert len({str(each) for each in expected}) == len(BUDGETS), "the budgets matter"
    asked = [prompt(300, seed=2)] * len(BUDGETS)
    settings = SEQUENCE | {"max_num_seqs": 8} | more
    with nodes("inproc", count, tmp_path) as urls, far_engine(urls, tmp_path, **settings) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert is_close(said(llm, BUDGETS, asked, 24), expected)


def test_two_microbatches_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.runner.runner.LearnedMicrobatches", AlwaysSplits)
    AlwaysSplits.num_split = 0
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, **SEQUENCE) as llm:
        assert is_close(answers(llm, prompts_of_all_lengths(), params(24)), local_answers())
        assert AlwaysSplits.num_split > llm.stats().num_steps / 2


@pytest.mark.exhaustive
def test_layers_with_states_beside_layers_that_choose(tmp_path):
    prompts = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in (20, 60, 100)]
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 160, "kv_dtype": "int8"}
    settings |= {"kv_policy": "quest:budget=20%,least=1"}
    model = str(checkpoint("qwen3_5_text", "long"))
    with LLM(model, **settings) as llm:
        expected = answers(llm, prompts, params(50))
    settings |= SEQUENCE
    with nodes("inproc", 2, tmp_path) as urls, far_engine(urls, tmp_path, model, **settings) as llm:
        assert is_close(answers(llm, prompts, params(50)), expected)
