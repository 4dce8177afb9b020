"""How much of the attention the tiles with the largest bounds hold:
python -m bench.kernels.selection_mass.

An fp32 model reads a text, and every eighth token of the second half chooses tiles by variants of
the rule: how many tiles share bounds, in how many bits bounds are, and what a K/V head takes of the
bounds of its query heads. A figure is the share of the softmax' weights on the chosen keys, the
mean over tokens, layers and query heads. "best" chooses by the weights themselves, which no rule
exceeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from ops.reference import ReferenceBackend
from quant.kv import TILE_TOKENS
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.model_source import load_weights, read_source
from serve.models.progress import LoadProgress
from serve.text.tokenizer import Tokenizer

_TEXT = Path(__file__).parents[1] / "data" / "heldout.txt"
_SHARES = (0.06, 0.12, 0.25, 0.5)
_EVERY = 8

Join = Callable[[Tensor], Tensor]
"""Bounds of query heads, [Hk, group, pages], to those of K/V heads, [Hk, pages]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A variant. tiles: that share bounds. bits: of bounds; 0: fp32. join: None takes the weights
    themselves."""

    name: str
    join: Join | None
    tiles: int = 1
    bits: int = 8


def _largest(bounds: Tensor) -> Tensor:
    return bounds.amax(1)


def _sum(bounds: Tensor) -> Tensor:
    return bounds.sum(1)


def _largest_after_peak(bounds: Tensor) -> Tensor:
    """The largest of the bounds, each below that of its head's best page."""
    return (bounds - bounds.amax(-1, keepdim=True)).amax(1)


def _mean_weight(bounds: Tensor) -> Tensor:
    """As if the bounds were scores: the mean of the query heads' weights."""
    return bounds.softmax(-1).mean(1)


RULES = (
    Rule("largest", _largest),
    Rule("largest, fp32 bounds", _largest, bits=0),
    Rule("sum", _sum),
    Rule("largest after peak", _largest_after_peak),
    Rule("mean weight", _mean_weight),
    Rule("largest, 2 tiles", _largest, tiles=2),
    Rule("largest, 4 tiles", _largest, tiles=4),
    Rule("best", None),
    Rule("best, 4 tiles", None, tiles=4),
)


@dataclass(slots=True)
class Masses:
    """Sums of the captured weights, by rule and share."""

    total: dict[tuple[str, float], float] = field(default_factory=dict)
    count: int = 0


def _pages(x: Tensor, size: int) -> Tensor:
    """Returns the whole pages of keys x: [T, ...], [pages, size, ...]."""
    count = len(x) // size
    return x[: count * size].reshape(count, size, *x.shape[1:])


def page_bounds(k: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Returns the maximum and minimum of each whole page of keys k: [T, Hk, D], [pages, Hk, D]."""
    pages = _pages(k, rule.tiles * TILE_TOKENS)
    most, least = pages.amax(1), pages.amin(1)
    if rule.bits:
        top = torch.maximum(most.abs(), least.abs()).amax(-1, keepdim=True)
        step = top / (2 ** (rule.bits - 1) - 1)
        most, least = (most / step).ceil() * step, (least / step).floor() * step
    return most, least


def captured(q: Tensor, k: Tensor, scale: float, rule: Rule, share: float) -> float:
    """Returns the mean over the heads of q: [H, D] of the weight on the chosen keys of k: [T, Hk,
    D], the page of the last one included."""
    size, kv_heads = rule.tiles * TILE_TOKENS, k.shape[1]
    own = (len(k) - 1) // size
    grouped = q.reshape(kv_heads, -1, q.shape[-1])
    weights = (torch.einsum("hgd,thd->hgt", grouped, k) * scale).softmax(-1)
    by_page = weights[..., : own * size].reshape(*weights.shape[:2], own, size).sum(-1)
    if rule.join is None:
        scores = by_page.sum(1)
    else:
        most, least = (x[:own].permute(1, 0, 2)[:, None] for x in page_bounds(k, rule))
        query = grouped[:, :, None]
        bounds = torch.maximum(query * most, query * least).sum(-1) * scale
        scores = rule.join(bounds)
    count = min(own, max(0, -(-int(len(k) * share) // size) - 1))
    chosen = scores.topk(count, -1).indices
    held = by_page.gather(-1, chosen[:, None].expand(-1, by_page.shape[1], -1)).sum(-1)
    return float((held + weights[..., own * size :].sum(-1)).mean())


class MassAttention:
    """Attention of one sequence in one step, in fp32, that notes what rules would capture.
    Implements Attention."""

    def __init__(self, layers: list[AttentionLayer], masses: Masses) -> None:
        self._layers, self._masses, self._backend = layers, masses, ReferenceBackend()

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        layer, q = self._layers[ticket.layer], ticket.q
        assert k is not None and v is not None, "a layer with K/V of its own"
        if rotation is not None:
            k = self._backend.rotary(k, *rotation)
        for row in range(len(q) // 2, len(q), _EVERY):
            self._masses.count += 1
            for rule in RULES:
                for share in _SHARES:
                    found = captured(q[row], k[: row + 1], layer.scale, rule, share)
                    key = rule.name, share
                    self._masses.total[key] = self._masses.total.get(key, 0.0) + found
        return Finished(_attend(q, k, v, layer.scale))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], heads[0][None], heads[1][None], is_causal=True, scale=scale
    )
    return out[0].transpose(0, 1).contiguous()


def measure(model_name: str, num_tokens: int, text: Path) -> Masses:
    config = EngineConfig(model=model_name, dtype="float32")
    model = load_weights(read_source(config), LoadProgress())
    tokenizer = Tokenizer.load(config.tokenizer_path, model=config.model_path)
    tokens = tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
    masses = Masses()
    with torch.inference_mode():
        attention = MassAttention(model.attention_layers(), masses)
        model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention)
    return masses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=_TEXT)
    options = parser.parse_args()
    masses = measure(options.model, options.tokens, options.text)
    names = [f"{100 * share:g} %" for share in _SHARES]
    table = Table("rule", *[Column(name, justify="right") for name in names])
    for rule in RULES:
        cells = [f"{masses.total[rule.name, share] / masses.count:.3f}" for share in _SHARES]
        table.add_row(rule.name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
