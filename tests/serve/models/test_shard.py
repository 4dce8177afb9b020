"""A model whose products are divided among ranks, or cut into stages, has the bits of one rank."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

from ops import get_backend
from serve.errors import ConfigError
from serve.models import Decoder, load_model, read_spec
from serve.models.checkpoint import Checkpoint
from serve.models.shard import WHOLE, Shard
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.decoders import ListAttention, token_ids
from tests.support.engine.quantized import ALL_CASES, write
from tests.support.engine.variants.table import first_every_day
from tests.support.group.thread_ranks import on_ranks
from tests.support.profile import every_day

CHUNKS = [9, 1, 5, 1]
ONE_RANK = "models whose layers have states are served by one rank"


def load(path, dtype: str, shard: Shard, *, is_random: bool = False) -> Decoder:
    load_part = functools.partial(load_model, path, shard=shard, is_random=is_random)
    backend = get_backend("cpu")
    if dtype == "float32":
        return load_part(dtype=torch.float32, backend=backend, unpack=True)
    quantized = backend.quantized
    make = functools.partial(
        quantized.rounded4, group=32, is_nf4=dtype == "nf4", is_searched=dtype == "int4"
    )
    return load_part(
        dtype=torch.float32,
        backend=backend,
        make_linear=quantized.int8 if dtype == "int8" else make,
        make_head=functools.partial(quantized.int8, is_head=True),
        keep_weight_dtype=True,
    )


def run(stages: list[Decoder], ids: list[int]) -> torch.Tensor:
    """Returns the logits of all positions, computed in chunks by a model's stages."""
    attentions = [ListAttention(stage.attention_layers()) for stage in stages]
    parts, start = [], 0
    for length in CHUNKS:
        positions, hidden = torch.arange(start, start + length), None
        rows = torch.tensor(ids[start : start + length])
        for stage, attention in zip(stages, attentions, strict=True):
            hidden = stage.forward(rows, positions, attention, hidden)
        parts.append(stages[-1].logits(hidden).clone())
        start += length
    return torch.cat(parts)


def ids_of(path) -> list[int]:
    return token_ids(sum(CHUNKS), read_spec(path).vocab_size)


def check_ranks(path, dtype: str, size: int, *, is_random: bool = False) -> None:
    ids = ids_of(path)
    whole = run([load(path, dtype, WHOLE, is_random=is_random)], ids)

    def work(exchange):
        shard = Shard(exchange.rank, size, None, exchange)
        return run([load(path, dtype, shard, is_random=is_random)], ids)

    for logits in on_ranks(size, work):
        assert torch.equal(logits, whole)


def can_divide(path, size: int) -> bool:
    return all(
        layer.num_heads % size == 0 and (layer.value_dim or layer.num_kv_heads % size == 0)
        for layer in read_spec(path).attention_layers
    )


@pytest.mark.parametrize("dtype", every_day([0, 1], ["float32", "int8", "nf4", "int4"]))
@pytest.mark.parametrize("variant", first_every_day(), ids=str)
def test_ranks_give_the_bits_of_one(variant, dtype):
    path = checkpoint(variant.family, variant.name)
    if read_spec(path).state_layers:
        pytest.skip(ONE_RANK)
    if not can_divide(path, 2):
        pytest.skip("its heads cannot be divided in two")
    check_ranks(path, dtype, 2)


def test_ranks_search_the_scales_of_one():
    check_ranks(checkpoint("llama"), "int4", 2)


FORMATS = list(ALL_CASES)


@pytest.mark.parametrize("form", every_day([FORMATS.index("awq"), FORMATS.index("gptq")], FORMATS))
def test_quantized_checkpoints(form, tmp_path):
    """Formats are cut by outputs too, so no group of inputs is divided."""
    path, _ = write(tmp_path, *ALL_CASES[form])
    check_ranks(path, "int8", 2)


READ_WHOLE = ("bnb-nf4", "bnb-nf4-nested", "bnb-fp4", "hqq4", "hqq8")
"""Formats whose tensors do not have the outputs as a dimension."""
LARGE_BLOCKS = ("fp8-blocks", "fp8-small-blocks", "fp8-powers", "float-block", "modelopt-blocks")
"""Blocks that are as large as the products of these models."""
CUT = [form for form in FORMATS if form not in READ_WHOLE + LARGE_BLOCKS]


@pytest.mark.parametrize("form", every_day([CUT.index("awq"), CUT.index("gptq")], CUT))
def test_a_rank_reads_its_own_codes(form, tmp_path, monkeypatch):
    """Of each product of two ranks, both together read hardly more than one process reads."""
    path, _ = write(tmp_path, *ALL_CASES[form])
    read: dict[str, int] = {}
    original = Checkpoint.fetch

    def fetch(self, name, index=None, cut=None):
        found = original(self, name, index, cut)
        if self.entries[name].dtype in ("I8", "U8", "I32", "F8_E4M3"):
            read[name] = read.get(name, 0) + found.nbytes
        return found

    def work(exchange):
        return load(path, "int8", Shard(exchange.rank, 2, None, exchange)).weights.embed.table

    monkeypatch.setattr(Checkpoint, "fetch", fetch)
    load(path, "int8", WHOLE)
    whole, read = sum(read.values()), {}
    tables = on_ranks(2, work)
    assert whole and sum(read.values()) < 1.2 * whole
    assert sum(table.shape[1] for table in tables) == read_spec(path).embed_size


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_more_ranks(dtype, size, tmp_path):
    """Experts, and widths of which the ranks have different numbers of columns."""
    config = checkpoint("qwen3_moe", "head-24") / "config.json"
    shutil.copy(config, tmp_path)

    def widen(values):
        values |= {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16}
        values |= {"hidden_size": 328, "moe_intermediate_size": 88}

    edit_json(tmp_path / "config.json", widen)
    check_ranks(tmp_path, dtype, size, is_random=True)


@pytest.mark.parametrize("dtype", every_day([0, 1], ["float32", "int8", "nf4", "int4"]))
@pytest.mark.parametrize("variant", first_every_day(), ids=str)
def test_stages_give_the_bits_of_one(variant, dtype):
    path = checkpoint(variant.family, variant.name)
    spec, ids = read_spec(path), ids_of(path)
    if spec.state_layers:
        pytest.skip(ONE_RANK)
    if spec.num_layers < 2:
        pytest.skip("it has one layer")
    cuts = [(0, 1), (1, spec.num_layers - 1)]
    if any(layer.shares == 0 for layer in spec.attention_layers):
        pytest.skip("one stage must hold layers that share K/V")
    stages = [load(path, dtype, Shard(layers=cut)) for cut in cuts]
    assert stages[0].weights.head is None
    assert spec.per_layer_vocab or stages[1].weights.embed is None
    assert torch.equal(run(stages, ids), run([load(path, dtype, WHOLE)], ids))


def test_stages_of_ranks_give_the_bits_of_one():
    path = checkpoint("llama", "base")
    ids = ids_of(path)

    def work(exchange):
        last = read_spec(path).num_layers - 1
        cuts = [(0, last), (last, 1)]
        return run(
            [load(path, "int8", Shard(exchange.rank, 2, cut, exchange)) for cut in cuts], ids
        )

    for logits in on_ranks(2, work):
        assert torch.equal(logits, run([load(path, "int8", WHOLE)], ids))


def test_heads_that_cannot_be_divided_are_named():
    path = checkpoint("llama", "base")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 5: .* heads cannot be divided"):
        Shard(0, 5).spec(read_spec(path))
