"""Mixtures of experts, latent attention, windows with sinks and shared K/V over memory nodes."""

from __future__ import annotations

import functools

import pytest

from serve import LLM
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.nodes.served_nodes import MIB, nodes
from tests.support.profile import every_day
from tests.whole.nodes.test_engine_nodes import (
    SETTINGS,
    growing,
    local_tokens,
    remote_tokens,
    tokens_of,
)

VOCAB = 320
MIXTURE, SINKS = ("qwen3_moe", "long"), ("gpt_oss", "long")
LATENT, LATENT_RANK = ("deepseek_v2", "long"), ("deepseek_v3", "long")
SHARED, CHUNKS = ("gemma4_text", "long"), ("llama4_text", "long")
ON_NODES = {"memory_prefill": "remote"}
INT8 = {"dtype": "int8"}
NODE_BYTES = {SINKS: 320 << 10, LATENT: 192 << 10}
COVERED = [
    (MIXTURE, "inproc", 2, "head", {}),
    (MIXTURE, "shm", 2, "sequence", ON_NODES),
    (SINKS, "inproc", 2, "head", ON_NODES),
    (SINKS, "tcp", 2, "request", {}),
    (LATENT, "inproc", 2, "request", ON_NODES),
    (LATENT, "shm", 2, "sequence", {}),
    (LATENT_RANK, "inproc", 3, "sequence", ON_NODES),
    (LATENT_RANK, "tcp", 2, "auto", {}),
    (LATENT_RANK, "inproc", 1, "auto", {}),
    (SHARED, "inproc", 2, "request", {}),
]
EVERY_DAY = (1, 2, 5, 6, 9)  # each kind of model once


@pytest.mark.parametrize(
    ("model", "scheme", "count", "partition", "more"), every_day(EVERY_DAY, COVERED)
)
def test_tokens_are_those_of_the_local_engine(model, scheme, count, partition, more, tmp_path):
    """Requests arrive and end while others decode, and share prefixes."""
    with nodes(scheme, count, tmp_path) as urls:
        tokens, stats = remote_tokens(model, VOCAB, urls, tmp_path, partition, **more)
    assert tokens == local_tokens(model, VOCAB)
    assert stats.prefix_hit_tokens > 0


@functools.cache
def local_int8_tokens(model):
    with LLM(str(checkpoint(*model)), kv_cache_bytes=64 * MIB, **(SETTINGS | INT8)) as llm:
        return tokens_of(llm, VOCAB)


@pytest.mark.parametrize(
    ("model", "partition"),
    every_day(
        (1, 3),
        [(MIXTURE, "head"), (SINKS, "request"), (LATENT, "request"), (LATENT_RANK, "auto")],
    ),
)
def test_int8(model, partition, tmp_path):
    """Results of stripes are merged in fp32, which int8 rows can round to another value, so the
    sequence partition is left out."""
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, _ = remote_tokens(model, VOCAB, urls, tmp_path, partition, **INT8)
    assert tokens == local_int8_tokens(model)


@pytest.mark.parametrize(
    ("model", "partition"), every_day((0,), [(SINKS, "head"), (LATENT, "request")])
)
def test_with_little_memory_sequences_are_preempted(model, partition, tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, stats = remote_tokens(
            model,
            VOCAB,
            urls,
            tmp_path,
            partition,
            growing,
            memory_node_bytes=NODE_BYTES[model],
            memory_policy="prompt_only",
        )
    assert stats.num_preemptions > 0
    assert tokens == local_tokens(model, VOCAB, growing)


@pytest.mark.parametrize(
    ("model", "partition", "reason"),
    [
        (LATENT, "head", r"memory_partition head needs a K/V head for each of 2 nodes"),
        (SINKS, "sequence", r"memory_partition sequence: the model has sliding windows"),
        (CHUNKS, "request", r"max_model_len 256 is above .* attention_chunk_size 32"),
    ],
)
def test_what_nodes_cannot_hold_is_refused(model, partition, reason, tmp_path):
    with (
        nodes("inproc", 2, tmp_path) as urls,
        pytest.raises(ConfigError, match=reason),
    ):
        LLM(
            str(checkpoint(*model)),
            memory_nodes=urls,
            memory_partition=partition,
            kv_cache_bytes=16 * MIB,
            **SETTINGS,
        )
