"""Converted models on several ranks give the tokens of one, each with its part of the weights."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from ops.reference import ReferenceBackend
from serve import LLM, SamplingParams
from serve.converter.model import Exported, export, load_converted
from serve.converter.program import Lookup
from serve.errors import ConfigError
from serve.models.shard import WHOLE, Shard
from tests.support.engine.decoders import ListAttention
from tests.support.engine.foreign import FOREIGN, foreign, make_foreign
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.nodes.served_nodes import MIB
from tests.support.profile import every_day

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("one_thread"),
]
REFERENCE = ReferenceBackend()
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
    return _served(foreign(family), grid, **settings)


def _served(path: Path, grid: tuple[int, int], **settings) -> list[tuple[list[int], float]]:
    tensor, stages = grid
    with LLM(
        str(path),
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
    ("gpt_neox", (1, 2), "int8"),
    ("helium", (2, 2), "int8"),
    ("granite_swa", (2, 1), "int8"),
    *((family, grid, "float32") for family in FOREIGN for grid in ((1, 2), (2, 1))),
    ("helium", (1, 2), "bfloat16"),
    ("helium", (2, 1), "int4"),
]


@pytest.mark.parametrize(("family", "grid", "dtype"), every_day(range(4), CASES), ids=str)
def test_tokens_of_one_process(thread_workers, family, grid, dtype):  # noqa: F811
    """One product for q, k and v; windows and sinks; log-probabilities to the last bit."""
    assert _found(family, grid, dtype=dtype) == _alone(family, dtype)
    assert thread_workers[0].num_started == grid[0] * grid[1] - 1


@pytest.mark.exhaustive
def test_three_stages(thread_workers, tmp_path):  # noqa: F811
    path = make_foreign(tmp_path, "helium", num_hidden_layers=3)
    found = [_served(path, (1, stages), dtype="int8") for stages in (1, 3)]
    assert found[0] == found[1]
    assert thread_workers[0].num_started == 2


@pytest.mark.process
def test_processes():
    assert _found("cohere", (1, 2), dtype="int8") == _alone("cohere", "int8")


class Alone:
    """The exchange of a rank whose model is loaded and not used."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError("no other rank is there")

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        raise AssertionError("no other rank is there")


PARTS = {
    "stages": [Shard(layers=(0, 1)), Shard(layers=(1, 1))],
    "tensor ranks": [Shard(rank, 2, None, Alone(rank)) for rank in (0, 1)],
}


@pytest.mark.parametrize("parts", PARTS)
def test_ranks_hold_one_model_together(parts):
    """The embedding is in the first stage, and on every tensor rank; the head in the last one."""
    exported = export(foreign("helium"), torch.float32)
    whole, _ = _weights(exported, WHOLE)
    held = [_weights(exported, shard) for shard in PARTS[parts]]
    assert [sum(products.values()) for products, _ in held] < [sum(whole.values())] * 2
    together = Counter(held[0][0])
    together.update(held[1][0])
    assert together == whole
    assert ["lm_head.weight" in products for products, _ in held] == [parts != "stages", True]
    assert [tables for _, tables in held] == [1, 0 if parts == "stages" else 1]


def _weights(exported: Exported, shard: Shard) -> tuple[Counter[str], int]:
    """Returns the numbers of packed weights, by name, and the tables of a shard."""
    sizes: list[int] = []

    def make(parts, bias, fusion):
        sizes.append(sum(part.numel() for part in parts))
        return REFERENCE.pack_linear(torch.cat(parts), bias)

    model = load_converted(exported, backend=REFERENCE, make_linear=make, shard=shard)
    found = model.products
    assert len(found) == len(sizes), "no product is packed twice"
    names = sorted(found, key=lambda name: list(found).index(name))
    tables = [x for x in model._weights.functions.values() if isinstance(x, Lookup)]
    return Counter(dict(zip(names, sizes, strict=True))), len(tables)


def test_a_stage_begins_where_the_hidden_state_alone_is_carried():
    """Between the two attentions of a layer of DiffLlama it is not."""
    assert export(foreign("diffllama"), torch.float32).stage_starts == [0, 2]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 3 .* has 2 parts"):
        _found("diffllama", (1, 3))


def test_rows_of_another_model_are_refused():
    exported = export(foreign("helium"), torch.float32)
    last = load_converted(exported, backend=REFERENCE, shard=Shard(layers=(1, 1)))
    attention = ListAttention(last.attention_layers())
    ids, positions = torch.tensor([5, 6]), torch.arange(2)
    with pytest.raises(ValueError, match="rows of 63 numbers from the stage before, not 64"):
        last.forward(ids, positions, attention, torch.zeros(2, 63))
    with pytest.raises(ValueError, match="rows of 0 numbers"):
        last.forward(ids, positions, attention)


def test_heads_that_cannot_be_divided_are_named():
    with pytest.raises(ConfigError, match="tensor_parallel_size 3: the model's 4 attention heads"):
        _found("helium", (3, 1))
