"""Attention that asks for it is told about what the next layer's queries will be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, ExpectsQueries, Ticket
from serve.models import Decoder
from serve.models.layers.blocks import Block
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import ListAttention, load, token_ids

FAMILIES = [("llama", "base"), ("qwen3", "base"), ("gemma2", "head-24"), ("stablelm", "parallel")]


class Told(ListAttention, ExpectsQueries):
    """Wants to know about `count` rows."""

    def __init__(self, layers: list[AttentionLayer], count: int) -> None:
        super().__init__(layers)
        self.count = count
        self.begun: dict[int, Tensor] = {}
        self.told: dict[int, Tensor] = {}

    def num_expected(self) -> int:
        return self.count

    def expect(self, layer: int, q: Tensor) -> None:
        assert ("finish", layer - 1) in self.calls and ("begin", layer) not in self.calls
        self.told[layer] = q.clone()

    def begin(self, layer: int, q: Tensor) -> Ticket:
        self.begun[layer] = q.clone()
        return super().begin(layer, q)


class NoChange:
    """An MLP that adds nothing."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x) if residual is None else residual


class OneByOne:
    """A stream of weights that are not all in memory."""

    def blocks(self, blocks: list[Block]) -> list[Block]:
        return blocks

    def close(self) -> None:
        pass


def forward(decoder: Decoder, count: int) -> tuple[Tensor, Told]:
    ids = torch.tensor(token_ids(9))
    attention = Told(decoder.attention_layers(), count)
    return decoder.forward(ids, torch.arange(9), attention), attention


@pytest.mark.parametrize("count", [9, 3])
@pytest.mark.parametrize(("family", "variant"), FAMILIES)
def test_each_layer_but_the_first_is_told_before_it_begins(
    family: str, variant: str, count: int
) -> None:
    decoder = load(checkpoint(family, variant))
    found, told = forward(decoder, count)
    assert list(told.told) == [*range(1, decoder.num_layers)]
    for layer, q in told.told.items():
        real = told.begun[layer][:count]
        assert q.shape == real.shape
        assert not torch.equal(q, real), "it comes before the MLP"
    assert torch.equal(found, forward(decoder, 0)[0]), "no bit depends on it"


@pytest.mark.parametrize(("family", "variant"), FAMILIES[:3])
def test_only_the_mlp_is_missing(family: str, variant: str) -> None:
    decoder = load(checkpoint(family, variant))
    for block in decoder.weights.blocks:
        block.mlp = NoChange()
    _, told = forward(decoder, 9)
    assert told.told
    assert all(torch.equal(q, told.begun[layer]) for layer, q in told.told.items())


def test_nothing_is_told_without_need() -> None:
    decoder = load(checkpoint("llama", "base"))
    assert not forward(decoder, 0)[1].told
    decoder.weights.stream = OneByOne()  # type: ignore[assignment]
    assert not forward(decoder, 9)[1].told, "the next block's weights are not in memory"
