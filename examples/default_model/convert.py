"""Turns a trained Llama into one with ReLU, or into a mixture, to be trained on."""

import json
from dataclasses import fields, replace
from pathlib import Path

import torch

from examples.default_model.export import read_weights
from examples.default_model.model import Layer, Llama, Shape

NOISE = 0.1  # of experts that begin alike, as a share of the standard deviation of their weights


def read_model(folder: Path, activation: str | None = None) -> Llama:
    """Reads a model that write_model wrote. activation: another one than it had."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = {f.name: config[f.name] for f in fields(Shape) if f.name in config}
    model = Llama(Shape(**known | ({"hidden_act": activation} if activation else {})))
    read_weights(folder, model)
    return model


@torch.no_grad()
def as_mixture(dense: Llama, num_experts: int, top_k: int) -> Llama:
    """Returns a mixture of slices of the MLPs ("sparse upcycling"), with random routers.

    Each MLP is cut into top_k slices, and expert e begins as slice e modulo top_k with noise, so
    that a token's experts have the size of the MLP."""
    size = dense.shape.intermediate_size // top_k
    assert size * top_k == dense.shape.intermediate_size and num_experts % top_k == 0
    shape = replace(
        dense.shape,
        intermediate_size=size,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    mixture = Llama(shape)
    mixture.init_weights()
    mixture.load_state_dict(dense.state_dict(), strict=False)
    for layer, old in zip(mixture.layers, dense.layers, strict=True):
        assert isinstance(layer, Layer) and isinstance(old, Layer)
        up, gate, down = old.mlp.up_proj, old.mlp.gate_proj, old.mlp.down_proj
        for number, expert in enumerate(layer.block_sparse_moe.experts):
            part = slice(number % top_k * size, (number % top_k + 1) * size)
            expert.w1.weight.copy_(_noisy(gate.weight[part]))
            expert.w3.weight.copy_(_noisy(up.weight[part]))
            # a token's weights of its experts have the sum 1
            expert.w2.weight.copy_(top_k * _noisy(down.weight[:, part]))
    return mixture


def _noisy(weight: torch.Tensor) -> torch.Tensor:
    return weight + NOISE * weight.std() * torch.randn_like(weight)
