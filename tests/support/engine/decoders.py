"""A decoder on the slow reference, and changed checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from ops.reference import ReferenceBackend
from serve.models import Decoder, load_model


class ListAttention:
    """K and V of one sequence in lists, with the softmax written out; also checks the order of
    calls."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
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
        self._append(index, len(q), k, v, rotation)
        owner = index if layer.shares is None else layer.shares
        group = layer.num_heads // layer.num_kv_heads
        keys = self.k[owner].repeat_interleave(group, dim=1)
        values = self.v[owner].repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,lhd->htl", q.float(), keys) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        num_keys = len(keys)
        row = torch.arange(num_keys - len(q), num_keys)[:, None]
        key = torch.arange(num_keys)[None]
        visible = key <= row
        if layer.window is not None:
            visible &= key > row - layer.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if layer.sinks is not None:
            sinks = torch.tensor(layer.sinks)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_keys]
        return Finished(torch.einsum("htl,lhd->thd", weights, values).to(q.dtype))

    def _append(
        self,
        index: int,
        num_rows: int,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation | None,
    ) -> None:
        layer = self.layers[index]
        assert (k is None) == (layer.shares is not None)
        if k is None:
            return
        if rotation is not None:
            k = ReferenceBackend().rotary(k, *rotation)
        if v is None:
            assert layer.value_dim is not None
            v = k[..., : layer.value_dim]
        assert k.shape[:2] == v.shape[:2] == (num_rows, layer.num_kv_heads)
        assert k.shape[2] == layer.head_dim and v.shape[2] == (layer.value_dim or layer.head_dim)
        self.k[index] = torch.cat((self.k[index], k.float()))
        self.v[index] = torch.cat((self.v[index], v.float()))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(path, dtype=dtype, backend=ReferenceBackend())


def run(decoder: Decoder, ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """Returns the logits of all positions, computed in chunks of the given lengths."""
    attention = ListAttention(decoder.attention_layers())
    parts, start = [], 0
    for length in chunks or [len(ids)]:
        part = torch.tensor(ids[start : start + length])
        positions = torch.arange(start, start + length)
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
