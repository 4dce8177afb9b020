"""Attention of an engine on a CUDA device whose K/V is on memory nodes.

The nodes are CPU processes and compute as for any engine. The device computes new-token attention
and the attention of prompts in the prompt tail cache, with the kernels and the tiles of local K/V
(memory/attention/cuda.py). A step is not captured in a CUDA graph, because its messages are posted
by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.cuda import CudaAttention, CudaKVLayout, CudaPlan, step_arrays
from memory.attention.seam import Attention, AttentionLayer, AttentionStep
from memory.nodes.prompt_tail_cache import TailSpan
from memory.nodes.remote_attention import RemoteAttention
from ops.backend import Partial
from ops.cuda.attention import PrefillChunk
from ops.kv_tiles import TILE_TOKENS

Pinned = Callable[[int], Tensor]
"""Returns [num_bytes] uint8 of page-locked memory."""


class StepSizes(NamedTuple):
    """The sizes of a step's launches."""

    rows: int
    decodes: int
    has_prompts: bool


class DeviceRows:
    """K/V tiles on a device, and attention over them, one step at a time."""

    def __init__(
        self, attention: CudaAttention, pinned: Pinned, memory: Tensor | None = None
    ) -> None:
        """memory: what the tiles are in, if they live as long as this object."""
        self.device = attention.arrays.buffer.device
        self._attention, self._memory = attention, memory
        self._host = pinned(4 * attention.num_words).view(torch.int32)

    def plan(self, step: AttentionStep, sizes: StepSizes) -> CudaPlan:
        """The device has finished the previous step."""
        rows, decodes, has_prompts = sizes
        self._attention.fill(self._host, step, rows, decodes, is_captured=True)
        self._attention.upload(self._host)
        return self._attention.view(rows, decodes, has_prompts)


Runs = list[tuple[int, int]]


class _Part(NamedTuple):
    """Rows of a step, as runs (first, length), and their attention."""

    runs: Runs
    plan: CudaPlan
    is_kept: bool


class CudaNewTokenAttention:
    """NewTokenAttention on a CUDA device.

    own: tiles for one layer's rows of one step, where results are merged with those of nodes.
    tails: the K/V of the prompt tail cache.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], own: DeviceRows | None, tails: DeviceRows | None
    ) -> None:
        self._layers = list(layers)
        self._own, self._tails = own, tails
        self.empty_sizes = StepSizes(0, 0, False)
        """The sizes of the launches of a step without sequences, which compiles kernels."""

    def plan(
        self, num_decodes: int, num_rows: Sequence[int], spans: Sequence[TailSpan | None]
    ) -> object:
        own: list[int] = []
        kept: list[tuple[TailSpan, int]] = []
        runs: tuple[Runs, Runs] = [], []
        row = 0
        for n, span in zip(num_rows, spans, strict=True):
            runs[span is not None].append((row, n))
            row += n
            if span is None:
                own.append(n)
            else:
                kept.append((span, n))
        parts: list[_Part] = []
        if own or not kept:
            if self._own is not None:
                parts.append(
                    _Part(runs[0], self._own.plan(*self._own_step(num_decodes, own)), False)
                )
            assert self._own is not None or not own, "the nodes attend over the rows' own keys"
        if kept:
            assert self._tails is not None
            rows = [n for _, n in kept]
            starts, lengths = [x.start for x, _ in kept], [x.num_tokens for x, _ in kept]
            step = AttentionStep(0, starts, rows, lengths)
            planned = self._tails.plan(step, StepSizes(sum(rows), 0, True))
            parts.append(_Part(runs[1], planned, True))
        return parts

    def _own_step(self, num_decodes: int, rows: list[int]) -> tuple[AttentionStep, StepSizes]:
        tiles = [-(-n // TILE_TOKENS) for n in rows]
        starts = [TILE_TOKENS * sum(tiles[:i]) for i in range(len(tiles))]
        sizes = StepSizes(sum(rows), num_decodes, len(rows) > num_decodes)
        return AttentionStep(num_decodes, starts, rows, rows), sizes if rows else self.empty_sizes

    def warm_up(self, num_rows: int, of_q: torch.dtype, of_k: torch.dtype) -> None:
        """Compiles the kernels over prompts, by a step whose rows belong to no sequence."""
        if self._tails is None:
            return
        tails, nothing = self._tails, AttentionStep(0, [], [], [])
        part = _Part([], tails.plan(nothing, StepSizes(num_rows, 0, True)), True)
        for number, layer in enumerate(self._layers):
            q = torch.zeros(num_rows, layer.num_heads, layer.head_dim, dtype=of_q)
            k = torch.zeros(num_rows, layer.num_kv_heads, layer.head_dim, dtype=of_k)
            q, k = q.to(tails.device), k.to(tails.device)
            self._attend(part, number, q, k, k)

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, list)
        v = k if v is None else v
        if len(plan) == 1:
            return self._attend(plan[0], layer, q, k, v)
        outs: list[tuple[Runs, Partial]] = []
        for part in plan:
            rows = [torch.cat([x[at : at + n] for at, n in part.runs]) for x in (q, k, v)]
            outs.append((part.runs, self._attend(part, layer, *rows)))
        out = torch.empty(len(q), *outs[0][1].out.shape[1:], dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for runs, found in outs:
            first = 0
            for at, n in runs:
                out[at : at + n] = found.out[first : first + n]
                lse[at : at + n] = found.lse[first : first + n]
                first += n
        return out, lse

    def _attend(self, part: _Part, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        if (
            part.is_kept and self._layers[layer].shares is not None
        ):  # the other layer has written it
            return part.plan.partial(layer, q, None, None)
        return part.plan.partial(layer, q, k, v)


def own_rows(
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    group: int,
    *,
    max_rows: int,
    max_seqs: int,
    device: torch.device,
    pinned: Pinned,
) -> DeviceRows:
    """Returns tiles for one layer's rows of one step, which all layers use in turn. ValueError for
    layers that the kernels do not support."""
    # a layer that shares K/V has its own copy here
    layouts = [CudaKVLayout([replace(layer, shares=None)], dtype, group) for layer in layers]
    tile_bytes = max(layout.tile_bytes for layout in layouts)
    for layout in layouts:
        layout.pad(tile_bytes)
    num_tiles = max_rows // TILE_TOKENS + max_seqs
    # zeros, because kernels also read the scales of rows that were never written
    memory = torch.zeros(num_tiles * tile_bytes + TILE_TOKENS, dtype=torch.uint8, device=device)
    base = memory.data_ptr() + -memory.data_ptr() % TILE_TOKENS
    sizes = {"max_rows": max_rows, "max_seqs": max_seqs, "max_len": max_rows}
    arrays = step_arrays(layers, **sizes, device=device)
    numbers = range(len(layers))
    attention = CudaAttention(layouts, [[i] for i in numbers], [base] * len(layers), arrays)
    return DeviceRows(attention, pinned, memory)


class CudaRemoteAttention:
    """RemoteAttention as the runner of a CUDA device drives it, one step at a time.

    A step is planned when the runner views it, because its edits and rows are posted at once.
    """

    is_remote = True
    num_words = 0  # the nodes get a step in messages

    def __init__(self, remote: RemoteAttention, new: CudaNewTokenAttention) -> None:
        self.remote = remote
        self._new = new
        self._step = AttentionStep(0, [], [], [])

    def fill(
        self,
        host: Tensor,
        step: AttentionStep,
        num_rows: int,
        num_decodes: int,
        *,
        is_captured: bool,
    ) -> Sequence[PrefillChunk]:
        """Keeps the step for `view`."""
        assert not is_captured, "a graph cannot post messages"
        self._step = step
        return ()

    def upload(self, host: Tensor) -> None:
        """Does nothing: the step is in no buffer."""

    def view(
        self,
        num_rows: int,
        num_decodes: int,
        has_prompts: bool,
        chunks: Sequence[PrefillChunk] = (),
    ) -> Attention:
        """Plans the step and posts its plan to the nodes."""
        self._new.empty_sizes = StepSizes(num_rows, num_decodes, has_prompts)
        return self.remote.plan(self._step)
