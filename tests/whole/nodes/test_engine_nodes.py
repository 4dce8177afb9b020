"""An engine over memory nodes gives the same tokens as over its own memory."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from itertools import product

import pytest

from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.profile import every_day

SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "seed": 1,
}


def model_path(model) -> str:
    return model if isinstance(model, str) else str(checkpoint(*model))


def mixed(vocab_size, count=14):
    """Prompts of many lengths, some with a common prefix, with various parameters and ends."""
    rng = random.Random(11)
    shared = [rng.randrange(5, vocab_size) for _ in range(200)]
    prompts, params = [], []
    for number in range(count):
        length = rng.choice([1, 3, 17, 40, 90, 150, 180])
        own = [rng.randrange(5, vocab_size) for _ in range(length)]
        prompts.append(shared[: rng.choice([0, 0, 100, 163])][: 190 - length] + own)
        params.append(
            SamplingParams(
                max_tokens=rng.choice([1, 8, 30, 60]),
                temperature=rng.choice([0.0, 0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                seed=number,
                min_tokens=rng.choice([0, 1]),
                ignore_eos=rng.random() < 0.8,
                stop_token_ids=[rng.randrange(5, vocab_size) for _ in range(20)],
                n=rng.choice([1, 1, 2]),
            )
        )
    return prompts, params


def growing(vocab_size):
    """Prompts that fit into memory together, but whose sequences outgrow it."""
    rng = random.Random(12)
    prompts = [[rng.randrange(5, vocab_size) for _ in range(50)] for _ in range(8)]
    return prompts, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


def tokens_of(llm, vocab_size, make_load=mixed):
    outputs = llm.generate(*make_load(vocab_size), use_tqdm=False)
    return [[o.token_ids for o in output.outputs] for output in outputs]


@functools.cache
def local_tokens(model, vocab_size, make_load=mixed):
    with LLM(model_path(model), kv_cache_bytes=64 * MIB, **SETTINGS) as llm:
        return tokens_of(llm, vocab_size, make_load)


def remote_tokens(model, vocab_size, urls, folder, partition="auto", make_load=mixed, **settings):
    with LLM(
        model_path(model),
        memory_nodes=urls,
        memory_partition=partition,
        memory_node_key_file=key_file(folder) if urls[0].startswith("tcp") else None,
        kv_cache_bytes=16 * MIB,
        **(SETTINGS | settings),
    ) as llm:
        tokens = tokens_of(llm, vocab_size, make_load)
        stats = llm.stats()
        assert (stats.pages_in_use, stats.num_unfinished) == (0, 0)
        assert (stats.memory_nodes, stats.memory_nodes_missing) == (len(urls), 0)
        assert (stats.memory_nodes_lost, stats.recomputed_sequences) == (0, 0)
        assert stats.memory_node_states.keys() == {*urls}
        assert {*stats.memory_node_states.values()} <= {"healthy", "late"}
        why = "endpoint: only GPUs over rdma:// have lanes"
        assert stats.memory_node_rows == dict.fromkeys(urls, why)
        return tokens, stats


MHA = ("llama", "mha")
COVERED = [
    (DEFAULT_MODEL, 4096, "inproc", 1, "head", {}),
    (DEFAULT_MODEL, 4096, "inproc", 2, "sequence", {}),
    (DEFAULT_MODEL, 4096, "inproc", 4, "request", {"memory_prefill": "remote"}),
    (DEFAULT_MODEL, 4096, "shm", 2, "head", {"memory_prefill": "remote"}),
    (DEFAULT_MODEL, 4096, "shm", 4, "sequence", {}),
    (DEFAULT_MODEL, 4096, "shm", 1, "request", {}),
    (DEFAULT_MODEL, 4096, "tcp", 2, "head", {}),
    (DEFAULT_MODEL, 4096, "tcp", 4, "sequence", {"memory_prefill": "remote"}),
    (DEFAULT_MODEL, 4096, "tcp", 2, "request", {}),
    (DEFAULT_MODEL, 4096, "tcp", 2, "head", {"memory_node_encryption": "on"}),
    (DEFAULT_MODEL, 4096, "tcp", 1, "sequence", {"memory_prefill": "remote"}),
    (MHA, 320, "inproc", 4, "head", {}),
    (MHA, 320, "tcp", 3, "head", {"memory_prefill": "remote"}),
    (("llama", "head-dim"), 320, "shm", 2, "head", {}),
    (("llama", "head-dim"), 320, "inproc", 2, "sequence", {"memory_prefill": "remote"}),
    (("gpt2", "base"), 320, "inproc", 2, "head", {}),
]
# Each scheme, partition and place of the prompt's attention, with encryption and without, and an
# odd number of rows in a head.
EVERY_DAY = (2, 4, 9, 13)


@pytest.mark.parametrize(
    ("model", "vocab", "scheme", "count", "partition", "more"), every_day(EVERY_DAY, COVERED)
)
def test_tokens_are_those_of_the_local_engine(
    model, vocab, scheme, count, partition, more, tmp_path
):
    """Requests arrive and end while others decode, and share prefixes."""
    encryption = more.get("memory_node_encryption", "auto")
    with nodes(scheme, count, tmp_path, encryption=encryption) as urls:
        tokens, stats = remote_tokens(model, vocab, urls, tmp_path, partition, **more)
    assert tokens == local_tokens(model, vocab)
    if (partition, count) != ("sequence", 4):  # its pages are longer than the common prefixes
        assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("partition", "prefill"),
    every_day((0, 3), list(product(["head", "request"], ["local", "remote"]))),
)
def test_sliding_windows(partition, prefill, tmp_path):
    """Some layers have a window, and pages behind it are released."""
    model = ("qwen2", "long-mixed")
    with nodes("inproc", 2, tmp_path) as urls:
        settings = {"memory_prefill": prefill}
        tokens, _ = remote_tokens(model, 320, urls, tmp_path, partition, **settings)
    assert tokens == local_tokens(model, 320)


@pytest.mark.parametrize("partition", every_day((1,), ["head", "sequence", "request"]))
def test_without_prefix_sharing(partition, tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, stats = remote_tokens(
            DEFAULT_MODEL, 4096, urls, tmp_path, partition, prefix_cache=False
        )
    assert tokens == local_tokens(DEFAULT_MODEL, 4096)
    assert stats.prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("partition", "node_bytes"),
    every_day((2,), [("head", 800 << 10), ("sequence", 800 << 10), ("request", 3 << 19)]),
)
def test_with_little_memory_sequences_are_preempted(partition, node_bytes, tmp_path):
    """Released tokens are recomputed on pages that other sequences have written since."""
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, stats = remote_tokens(
            DEFAULT_MODEL,
            4096,
            urls,
            tmp_path,
            partition,
            growing,
            memory_node_bytes=node_bytes,
            memory_policy="prompt_only",
        )
    assert stats.num_preemptions > 0
    assert tokens == local_tokens(DEFAULT_MODEL, 4096, growing)


class AlwaysSplits:
    """Splits every step into two micro-batches."""

    num_split = 0

    def splits(self, num_decodes, num_prompt_rows):
        AlwaysSplits.num_split += 1
        return True

    def learn(self, num_decodes, num_prompt_rows, is_split, seconds):
        pass


@pytest.mark.parametrize(
    ("partition", "scheme"),
    every_day((1,), [("head", "tcp"), ("sequence", "inproc"), ("request", "shm")]),
)
def test_two_microbatches_in_flight(partition, scheme, tmp_path, monkeypatch):
    monkeypatch.setattr("serve.runner.runner.LearnedMicrobatches", AlwaysSplits)
    AlwaysSplits.num_split = 0
    with nodes(scheme, 2, tmp_path) as urls:
        tokens, stats = remote_tokens(DEFAULT_MODEL, 4096, urls, tmp_path, partition)
    assert tokens == local_tokens(DEFAULT_MODEL, 4096)
    assert AlwaysSplits.num_split > stats.num_steps / 2


@pytest.mark.exhaustive
def test_two_engines_share_a_node(tmp_path):
    with nodes("shm", 1, tmp_path) as urls:
        half = {"memory_node_bytes": 8 * MIB, "kv_cache_bytes": 16 * MIB}
        with (
            LLM(DEFAULT_MODEL, memory_nodes=urls, **(SETTINGS | half)) as one,
            LLM(DEFAULT_MODEL, memory_nodes=urls, **(SETTINGS | half)) as two,
        ):
            assert tokens_of(one, 4096) == local_tokens(DEFAULT_MODEL, 4096)
            assert tokens_of(two, 4096) == local_tokens(DEFAULT_MODEL, 4096)


QUESTIONS = [
    "What is the opposite of hot?",
    "What is 3 plus 4?",
    "What is your name?",
    "What is the capital of France?",
    "What is the opposite of up?",
    "What is the opposite of big?",
]


def answers(**settings):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(max_num_seqs=4, max_model_len=300, kv_cache_bytes=32 * MIB, **settings) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def scored(vocab_size):
    """As `mixed`, with the log-probability of each token."""
    prompts, params = mixed(vocab_size, count=10)
    return prompts, [replace(one, logprobs=0) for one in params]


def scores_of(make_load=scored, one_by_one=False, **settings):
    """Returns each answer's tokens and their log-probabilities."""
    with LLM(DEFAULT_MODEL, **(SETTINGS | {"kv_cache_bytes": 16 * MIB} | settings)) as llm:
        prompts, params = make_load(4096)
        if one_by_one:
            pairs = zip(prompts, params, strict=True)
            outputs = [llm.generate([p], one, use_tqdm=False)[0] for p, one in pairs]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    answers = [o for output in outputs for o in output.outputs]
    found = [
        [
            (token, given[token].logprob)
            for token, given in zip(o.token_ids, o.logprobs, strict=True)
        ]
        for o in answers
    ]
    return found, stats


@functools.cache
def local_scores(dtype, kv_dtype, one_by_one):
    with one_store():
        return scores_of(one_by_one=one_by_one, dtype=dtype, kv_dtype=kv_dtype)[0]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "scheme", "count", "partition", "more"),
    every_day(
        (1, 2, 5, 6),
        [
            ("int8", "auto", "inproc", 2, "head", {}),
            ("int8", "int4", "inproc", 2, "head", {}),
            ("int8", "auto", "tcp", 2, "head", {"memory_prefill": "remote"}),
            ("int8", "auto", "shm", 2, "request", {}),
            ("int8", "auto", "inproc", 3, "auto", {"memory_prefill": "remote"}),
            ("bfloat16", "int8", "inproc", 2, "head", {}),
            ("bfloat16", "int4", "inproc", 2, "request", {"memory_prefill": "remote"}),
            ("bfloat16", "auto", "inproc", 2, "head", {"memory_prefill": "remote"}),
            ("bfloat16", "auto", "inproc", 2, "head", {}),
            ("float32", "bfloat16", "inproc", 2, "request", {}),
            ("float32", "auto", "inproc", 3, "request", {}),
        ],
    ),
)
def test_answers_have_the_bits_of_the_local_engine(
    dtype, kv_dtype, scheme, count, partition, more, tmp_path
):
    """Prompts are cut into chunks beside decoding sequences, and share prefixes. Where K/V is not
    int8 or int4, the bits depend on how prompts are cut, so requests come one by one."""
    one_by_one = dtype != "int8" and kv_dtype not in ("int8", "int4")
    with nodes(scheme, count, tmp_path) as urls:
        remote, stats = scores_of(
            one_by_one=one_by_one,
            dtype=dtype,
            kv_dtype=kv_dtype,
            memory_nodes=urls,
            memory_partition=partition,
            memory_node_key_file=key_file(tmp_path) if scheme == "tcp" else None,
            **more,
        )
    assert remote == local_scores(dtype, kv_dtype, one_by_one)
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("partition", "node_bytes", "prefill"),
    every_day(
        (0, 3),
        [
            ("head", 300 << 10, "local"),
            ("head", 300 << 10, "remote"),
            ("request", 450 << 10, "local"),
            ("request", 450 << 10, "remote"),
        ],
    ),
)
def test_preempted_sequences_have_the_bits_of_the_local_engine(
    partition, node_bytes, prefill, tmp_path
):
    """int8 K/V that is computed again has the same bits, although chunks are cut elsewhere."""

    def long_answers(vocab_size):
        prompts, params = growing(vocab_size)
        return prompts, replace(params, logprobs=0)

    local, _ = scores_of(long_answers, dtype="int8", kv_cache_bytes=64 * MIB)
    with nodes("inproc", 2, tmp_path) as urls:
        little = {"memory_node_bytes": node_bytes, "memory_policy": "prompt_only"}
        remote, stats = scores_of(
            long_answers,
            dtype="int8",
            memory_nodes=urls,
            memory_partition=partition,
            memory_prefill=prefill,
            **little,
        )
    assert stats.num_preemptions > 0
    assert remote == local


@pytest.mark.parametrize(
    ("dtype", "partition", "count", "more"),
    every_day(
        (1, 3),
        [
            ("bfloat16", "sequence", 3, {"memory_prefill": "remote"}),
            ("int8", "sequence", 2, {"memory_prefill": "remote"}),
            ("int8", "head", 2, {"memory_wire": "int8"}),
            ("float32", "head", 2, {"memory_wire": "bfloat16", "kv_dtype": "bfloat16"}),
        ],
    ),
)
def test_settings_that_round_otherwise_give_the_same_short_answers(
    dtype, partition, count, more, tmp_path
):
    """Only short answers that end by themselves are compared, since rounding moves logits and a
    long text may differ after a near-tie."""
    with nodes("inproc", count, tmp_path) as urls:
        remote = answers(dtype=dtype, memory_nodes=urls, memory_partition=partition, **more)
    local = answers(dtype=dtype)
    assert {reason for _, reason in local} == {"stop"}
    assert remote == local
