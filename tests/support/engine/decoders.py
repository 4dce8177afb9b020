"""A decoder on the slow reference, and changed checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, LayerState, Rotation, Ticket
from memory.states.layout import StateLayer
from ops.reference import ReferenceBackend, attention_fp64
from ops.states import NO_RECORD, StateSegments
from serve.models import Decoder, load_model


class OneState:
    """The states of one sequence, in one record."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        self._convs = [torch.zeros(1, *layer.conv) for layer in layers]
        self._heads = [None if x.heads is None else torch.zeros(1, *x.heads) for x in layers]
        self._source = NO_RECORD
        self._segments: StateSegments | None = None

    def begin(self, num_rows: int) -> None:
        """Begins a call with the next rows."""
        columns = ([0, num_rows], [self._source], [0], [0, 1])
        self._segments = StateSegments(*[torch.tensor(column) for column in columns])
        self._source = 0

    def layer(self, number: int) -> LayerState:
        assert self._segments is not None
        return LayerState(self._convs[number], self._heads[number], self._segments)


class ListAttention:
    """K and V of one sequence in lists, attended over in fp64; also checks the order of calls."""

    def __init__(
        self, layers: list[AttentionLayer], state_layers: Sequence[StateLayer] = ()
    ) -> None:
        self.states = OneState(state_layers)
        self.layers = layers
        self.k = [torch.empty(0, x.num_kv_heads, x.head_dim) for x in layers]
        self.v = [torch.empty(0, x.num_kv_heads, x.value_dim or x.head_dim) for x in layers]
        self.calls: list[tuple[str, int]] = []

    def begin(self, layer: int, q: Tensor) -> Ticket:
        self.calls.append(("begin", layer))
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        index, q, _ = ticket
        self.calls.append(("finish", index))
        layer = self.layers[index]
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        if layer.shares is None:
            assert k is not None
            self._append(index, k, v, rotation)
        else:
            assert k is None
            assert v is None
            index = layer.shares
        length = len(self.k[index])
        first, parts = length - len(q), []
        while first < length:
            chunk = layer.chunk or length
            begin = first // chunk * chunk
            end = min(length, begin + chunk)
            rows = slice(first - length + len(q), end - length + len(q))
            parts.append(self._attend(layer, q[rows], index, slice(begin, end)))
            first = end
        return Finished(torch.cat(parts) if parts else torch.empty_like(q))

    def _attend(self, layer: AttentionLayer, q: Tensor, owner: int, keys: slice) -> Tensor:
        attended = attention_fp64(
            q,
            self.k[owner][keys],
            self.v[owner][keys],
            layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        return attended.out.to(q.dtype)

    def _append(self, index: int, k: Tensor, v: Tensor | None, rotation: Rotation | None) -> None:
        layer = self.layers[index]
        if rotation is not None:
            k = ReferenceBackend().rotary(k, *rotation)
        if layer.value_dim is not None:
            assert v is None
            v = k[..., : layer.value_dim]
        assert v is not None
        assert k.shape == (len(k), layer.num_kv_heads, layer.head_dim)
        assert v.shape == (*k.shape[:2], layer.value_dim or layer.head_dim)
        self.k[index] = torch.cat((self.k[index], k.float()))
        self.v[index] = torch.cat((self.v[index], v.float()))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(path, dtype=dtype, backend=ReferenceBackend())


def run(decoder: Decoder, ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """Returns the logits of all positions, computed in chunks of the given lengths."""
    attention = ListAttention(decoder.attention_layers(), decoder.spec.state_layers)
    parts, start = [], 0
    for length in chunks or [len(ids)]:
        part = torch.tensor(ids[start : start + length])
        positions = torch.arange(start, start + length)
        attention.states.begin(length)
        parts.append(decoder.logits(decoder.forward(part, positions, attention)))
        start += length
    assert start == len(ids)
    return torch.cat(parts)


def token_ids(num_tokens: int, vocab_size: int = 300, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


def copy_of(path: Path, directory: Path) -> Path:
    return Path(shutil.copytree(path, directory / "copy"))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})
