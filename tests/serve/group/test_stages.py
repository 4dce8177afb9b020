"""Stages take as long as one another, also where layers differ in the keys that they see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.errors import ConfigError
from serve.group.stages import layer_stages
from serve.models import ModelSpec, read_spec
from tests.support.engine.checkpoints import checkpoint


def model(windows: list[int | None], max_model_len: int = 131_072) -> ModelSpec:
    """Layers of the same weights with these windows."""
    spec = read_spec(checkpoint("llama", "base"))
    layers = [
        replace(spec.layers[0], attention=replace(spec.layers[0].attention, window=window))
        for window in windows
    ]
    return replace(spec, layers=tuple(layers), max_model_len=max_model_len)


def counts(*arguments, **options) -> list[int]:
    return [count for _, count in layer_stages(*arguments, **options)]


def test_layers_that_are_alike_are_divided_evenly():
    assert counts(model([None] * 12), 3) == counts(model([64] * 12), 3) == [4, 4, 4]


def test_layers_that_see_all_keys_count_for_more():
    """As in Gemma 3, which has one after five with a window, but unevenly placed."""
    spec = model([64] * 9 + [None] * 3)
    assert counts(spec, 2) == [10, 2]
    chunked = replace(
        spec,
        layers=tuple(
            replace(x, attention=replace(x.attention, window=None, chunk=x.attention.window))
            for x in spec.layers
        ),
    )
    assert counts(chunked, 2) == [10, 2]


@pytest.mark.parametrize("short", [{"max_len": 64}, {}], ids=["served", "model"])
def test_short_contexts_fit_the_window(short):
    spec = model([64] * 9 + [None] * 3, 131_072 if short else 64)
    assert counts(spec, 2, **short) == [6, 6]


def test_what_cannot_be_divided_is_described():
    spec = model([None] * 3)
    with pytest.raises(ConfigError, match="into: it has 3 layers"):
        layer_stages(spec, 4)
    shared = replace(spec.layers[2], attention=replace(spec.layers[2].attention, shares=1))
    spec = replace(spec, layers=(*spec.layers[:2], shared))
    with pytest.raises(ConfigError, match="its 3 layers form 2 groups that share K/V"):
        layer_stages(spec, 3)
    with pytest.raises(ConfigError, match="it has 2 parts between attentions"):
        layer_stages(model([None] * 3), 3, starts=[0, 2])
