"""Converted models on several ranks give the tokens of one, each with its part of the weights."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from ops import get_backend
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.converter.model import export, load_converted
from serve.errors import ConfigError
from serve.models.shard import Shard
from tests.support.engine.foreign import foreign
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.nodes.served_nodes import MIB
from tests.support.profile import every_day

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("one_thread"),
]
SETTINGS = {
    "converter": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_chunk_tokens": 16,
    "max_model_len": 140,
    "kv_cache_bytes": 4 * MIB,
}


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(7)
    shared = [rng.randrange(2, 300) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 40])] + [rng.randrange(2, 300) for _ in range(rng.choice([1, 25]))]
        for _ in range(6)
    ]
    params = [
        SamplingParams(
            max_tokens=12,
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(1000),
            ignore_eos=True,
            logprobs=1,
        )
        for _ in prompts
    ]
    return prompts, params


def _found(family: str, grid: tuple[int, int], **settings) -> list[tuple[list[int], float]]:
    tensor, stages = grid
    with LLM(
        str(foreign(family)),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **SETTINGS | settings,
    ) as llm:
        outputs = llm.generate(*_requests(), use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    return [(x.outputs[0].token_ids, x.outputs[0].cumulative_logprob) for x in outputs]


@functools.cache
def _alone(family: str, dtype: str) -> list[tuple[list[int], float]]:
    return _found(family, (1, 1), dtype=dtype)


CASES = [
    ("helium", (1, 2), "float32"),
    ("helium", (2, 1), "float32"),
    ("helium", (1, 2), "int8"),
    ("helium", (2, 2), "int8"),
]


@pytest.mark.parametrize(
    ("family", "grid", "dtype"), CASES, ids=str
)
def test_tokens_of_one_process(thread_workers, family, grid, dtype):  # noqa: F811
    expected = _alone(family, dtype)
    found = _found(family, grid, dtype=dtype)
    assert found == expected
    assert thread_workers[0].num_started == grid[0] * grid[1] - 1
