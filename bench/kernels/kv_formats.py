"""What a format of K/V changes in a model's predictions: python -m bench.kernels.kv_formats.

Every format is computed in fp32 by torch, on an fp32 model that reads windows of a text, so that
int8 and int4 K/V can be compared with formats that no kernel has: 16 even steps between a minimum
and a maximum of 32 numbers of a head, or of a channel's 64 tokens (KIVI, arXiv 2402.02750), with
heads as they are or rotated by a Hadamard matrix (QuaRot, arXiv 2404.00456), and recent tokens in 8
bits: so many last ones, or, as int4 K/V has it, those of a row's own block. The reference is fp32
K/V. Rows of two formats are K | V.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from ops import Backend
from ops.reference import ReferenceBackend, hadamard, round_kv4
from quant.kv import RECENT_BLOCK
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.model_source import load_weights, read_source
from serve.models import StepModel
from serve.models.progress import LoadProgress
from serve.text.tokenizer import Tokenizer

_TEXT = Path(__file__).parents[1] / "data" / "heldout.txt"
_GROUP, _INT8_GROUP = 32, 64
_CHANNEL_TOKENS = 64
_BLOCKS = (RECENT_BLOCK // 2, RECENT_BLOCK, 2 * RECENT_BLOCK)
_MIN_AND_SCALE_BITS = 32

Round = Callable[[Tensor], Tensor]
"""Rounds K or V of a window, [tokens, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of K or V. bits: of a number, scales included. run: the tokens that are rounded
    together; those of an unfinished run are in 8 bits. recent: a row reads so many last tokens, its
    own included, in 8 bits, too; block: those from the last multiple of it on. This memory is not
    in `bits`."""

    name: str
    rounded: Round
    bits: float
    run: int = 1
    recent: int = 0
    block: int = 0


def _with_recent(form: Format, tokens: int) -> Format:
    return replace(form, name=f"{form.name}, last {tokens} int8", recent=tokens)


def _with_block(form: Format, tokens: int) -> Format:
    return replace(form, name=f"{form.name}, own block of {tokens} int8", block=tokens)


def _as_is(x: Tensor) -> Tensor:
    return x


def _int8(x: Tensor) -> Tensor:
    groups = x.reshape(*x.shape[:-1], -1, _INT8_GROUP)
    scale = _half(groups.abs().amax(-1, keepdim=True) / 127)
    return ((groups / scale).round() * scale).reshape(x.shape)


def _even(x: Tensor, group: int) -> Tensor:
    """Rounds groups of neighbouring numbers to 16 even steps from their least to their largest."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    low = groups.amin(-1, keepdim=True).half().float()
    scale = _half((groups.amax(-1, keepdim=True) - low) / 15)
    codes = ((groups - low) / scale).round().clamp(0, 15)
    return (codes * scale + low).reshape(x.shape)


def _half(scale: Tensor) -> Tensor:
    scale = scale.half().float()
    return torch.where(scale == 0, 1.0, scale)


def _per_token(x: Tensor) -> Tensor:
    return _even(x, _GROUP)


def _rotated(x: Tensor) -> Tensor:
    return _turned(_per_token(_turned(x)))


def _stored(x: Tensor) -> Tensor:
    return round_kv4(x, _GROUP)


def _stored_plain(x: Tensor) -> Tensor:
    """Rounds to the levels of int4 K/V without the rotation, which is undone before."""
    return _turned(_stored(_turned(x)))


def _turned(x: Tensor) -> Tensor:
    """Rotates heads by a Hadamard matrix, which is its own inverse."""
    size = x.shape[-1] & -x.shape[-1]
    return hadamard(x) / math.sqrt(size)


def _per_channel(x: Tensor) -> Tensor:
    """Tokens after the last whole group are not rounded here; no row reads them in 4 bits."""
    whole = len(x) // _CHANNEL_TOKENS * _CHANNEL_TOKENS
    rounded = _even(x[:whole].movedim(0, -1), _CHANNEL_TOKENS).movedim(-1, 0)
    return torch.cat((rounded, x[whole:])) if whole else x


_AS_IS = Format("fp32", _as_is, 32)
_INT8 = Format("int8, groups of 64", _int8, 8 + 16 / _INT8_GROUP)
_TOKEN_BITS = 4 + _MIN_AND_SCALE_BITS / _GROUP
_STORED_BITS = 4 + 16 / _GROUP
_CHANNEL_BITS = 4 + _MIN_AND_SCALE_BITS / _CHANNEL_TOKENS
_PLAIN = Format("even steps per token", _per_token, _TOKEN_BITS)
_ROTATED = Format("even steps per token, rotated", _rotated, _TOKEN_BITS)
_STORED = Format("int4", _stored, _STORED_BITS)
_CHANNEL = Format("even steps per channel", _per_channel, _CHANNEL_BITS, run=_CHANNEL_TOKENS)
_TOKENS = (
    _INT8,
    _PLAIN,
    _ROTATED,
    Format("int4, not rotated", _stored_plain, _STORED_BITS),
    _STORED,
)
_KEYS = (
    *_TOKENS,
    _CHANNEL,
    _with_block(_STORED, RECENT_BLOCK),
    *(_with_recent(each, tokens) for tokens in (64, 128) for each in (_STORED, _CHANNEL)),
)
_VALUES = (
    *_TOKENS,
    _with_block(_STORED, RECENT_BLOCK),
    *(_with_recent(_STORED, tokens) for tokens in (64, 128)),
)
_PAIRS = (
    (_INT8, _INT8),
    *((keys, keys) for keys in (_PLAIN, _ROTATED, _STORED)),
    *((keys, keys) for keys in (_with_block(_STORED, size) for size in _BLOCKS)),
    (_CHANNEL, _STORED),
    *(
        (_with_recent(keys, tokens), _with_recent(_STORED, tokens))
        for tokens in (64, 128)
        for keys in (_STORED, _CHANNEL)
    ),
)


class _Attention:
    """Causal attention of one window over K and V in two formats. Implements Attention for one
    step that has all tokens of the window."""

    def __init__(
        self, layers: list[AttentionLayer], backend: Backend, keys: Format, values: Format
    ) -> None:
        self._layers, self._backend, self._keys, self._values = layers, backend, keys, values

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        layer, q = self._layers[ticket.layer], ticket.q
        assert k is not None and v is not None
        if rotation is not None:
            k = self._backend.rotary(k, *rotation)
        num_rows, repeats = len(q), layer.num_heads // layer.num_kv_heads
        rows, places = torch.arange(num_rows)[:, None], torch.arange(num_rows)
        old, fresh = (
            torch.einsum("qhd,khd->hqk", q, each.repeat_interleave(repeats, 1))
            for each in _both(self._keys, k)
        )
        scores = torch.where(_is_fresh(self._keys, rows, places), fresh, old) * layer.scale
        share = scores.masked_fill(places > rows, -math.inf).softmax(-1)
        old_v, fresh_v = (x.repeat_interleave(repeats, 1) for x in _both(self._values, v))
        is_fresh = _is_fresh(self._values, rows, places)
        out = torch.einsum("hqk,khd->qhd", share.masked_fill(is_fresh, 0), old_v)
        return Finished(
            out + torch.einsum("hqk,khd->qhd", share.masked_fill(~is_fresh, 0), fresh_v)
        )


def _both(form: Format, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns K or V as old tokens have it, and as recent ones do."""
    return form.rounded(x), _int8(x)


def _is_fresh(form: Format, rows: Tensor, places: Tensor) -> Tensor:
    """Returns which keys each row reads in 8 bits, [rows, keys]."""
    ends = places // form.run * form.run + form.run
    is_fresh = (rows - places < form.recent) | (ends > rows + 1)
    return is_fresh | (places >= rows // form.block * form.block) if form.block else is_fresh


@torch.inference_mode()
def _log_probabilities(
    model: StepModel, windows: list[list[int]], keys: Format, values: Format
) -> Iterator[Tensor]:
    """Yields the distribution after each token of a window but the last, [tokens - 1, vocab]."""
    attention = _Attention(model.attention_layers(), ReferenceBackend(), keys, values)
    for tokens in windows:
        ids = torch.tensor(tokens)
        hidden = model.forward(ids, torch.arange(len(ids)), attention)
        yield torch.log_softmax(model.logits(hidden), -1)[:-1]


def compare(
    model: StepModel, windows: list[list[int]], pairs: list[tuple[Format, Format]]
) -> list[tuple[float, float]]:
    """Returns the perplexity and the mean KL divergence from fp32 K/V of each pair of formats."""
    expected = list(_log_probabilities(model, windows, _AS_IS, _AS_IS))
    found = []
    for keys, values in pairs:
        loss = kl = count = 0.0
        readings = zip(
            windows, expected, _log_probabilities(model, windows, keys, values), strict=True
        )
        for tokens, reference, got in readings:
            following = torch.tensor(tokens[1:])[:, None]
            loss -= float(got.gather(1, following).double().sum())
            kl += float((reference.exp().double() * (reference - got)).sum())
            count += len(got)
        found.append((math.exp(loss / count), kl / count))
    return found


def _table(title: str, names: list[tuple[str, float]], found: list[tuple[float, float]]) -> Table:
    table = Table(Column(title, no_wrap=True), "bits", "perplexity", "KL")
    for (name, bits), (perplexity, kl) in zip(names, found, strict=True):
        table.add_row(name, f"{bits:.3g}", f"{perplexity:.4f}", f"{kl:.2e}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a directory; the embedded model")
    parser.add_argument("--text", type=Path, default=_TEXT, help="a text file")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--quick", action="store_true", help="256 tokens, as a smoke test")
    args = parser.parse_args()
    num_tokens = 256 if args.quick else args.tokens
    source = read_source(EngineConfig(model=args.model, dtype="float32"))
    model = load_weights(source, LoadProgress())
    if any(x.window is not None or x.value_dim is not None for x in model.attention_layers()):
        parser.error("the model has windows or latents")
    tokens = Tokenizer.load(source.config.tokenizer_path, model=source.config.model_path).encode(
        args.text.read_text(encoding="utf-8")
    )[:num_tokens]
    cut = [tokens[i : i + args.window] for i in range(0, len(tokens), args.window)]
    windows = [part for part in cut if len(part) > 1]
    console = Console()
    parts: list[tuple[str, list[tuple[Format, Format]]]] = [
        ("K alone", [(each, _AS_IS) for each in (_AS_IS, *_KEYS)]),
        ("V alone", [(_AS_IS, each) for each in _VALUES]),
        ("K and V", list(_PAIRS)),
    ]
    for title, pairs in parts:
        names = [_named(title, *pair) for pair in pairs]
        console.print(_table(title, names, compare(model, windows, pairs)))


def _named(title: str, keys: Format, values: Format) -> tuple[str, float]:
    if title == "V alone":
        return values.name, values.bits
    if title == "K alone":
        return keys.name, keys.bits
    both = keys.name if keys is values else f"{keys.name} | {values.name}"
    return both, (keys.bits + values.bits) / 2


if __name__ == "__main__":
    main()
