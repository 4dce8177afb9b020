"""The second moments of the inputs of a model's products on a text, one layer at a time.

Each layer is loaded alone, in fp32, and reads the results of the one before for all of the text.
So memory holds one layer, its moments, and the hidden states of the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memory.attention.kv_layout import rotate_keys, values_of
from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from memory.states.records import RecordStates, unkept_states
from ops import get_backend
from ops.backend import NO_FUSION, Backend, Fusion, KeyValues, LinearOp, Norm
from ops.linear import apply_norm
from serve.models import load_model, read_spec
from serve.models.loaded_tensors import LoadedTensors
from serve.models.parts import Part
from serve.models.shard import Shard

Moments = dict[str, Tensor]
"""For modules of a layer [in, in] fp32, the sum of x x^T over the rows x of the text. Modules that
read the same rows have the same tensor."""


@torch.inference_mode()
def layer_moments(path: Path, windows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Moments]]:
    """Yields the number of each layer and the moments of its products' inputs.

    windows: token ids, each window read from an empty context. ModelLoadError as of `load_model`.
    """
    backend = get_backend("cpu")
    hidden: list[Tensor | None] = [None] * len(windows)
    for number in range(read_spec(path).num_layers):
        moments: Moments = {}
        stage = load_model(
            path,
            dtype=torch.float32,
            backend=backend,
            shard=Shard(layers=(number, 1)),
            make_tensors=functools.partial(_RecordedTensors, moments),
        )
        layers = stage.attention_layers()
        for index, window in enumerate(windows):
            ids, positions = torch.tensor(window), torch.arange(len(window))
            states = unkept_states(stage.spec.state_layers, len(window), backend.device)
            attention = _WindowAttention(layers, backend, states)
            hidden[index] = stage.forward(ids, positions, attention, hidden[index])
        yield number, moments


class _RecordedTensors(LoadedTensors):
    """Loads products that add the moments of their inputs to a dictionary, and no head."""

    def __init__(self, moments: Moments, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._moments = moments

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> Any:
        if is_head:
            return None  # nothing reads logits, and the head is a large part of a small model
        op = super().product(parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale)
        total = torch.zeros(num_in, num_in)
        self._moments |= {part.module: total for part in parts if not part.is_fused}
        return _Recorded(op, fusion.norm, self.backend, total)


class _Recorded:
    """A LinearOp that notes the moments of its inputs after the norm."""

    def __init__(self, op: LinearOp, norm: Norm | None, backend: Backend, total: Tensor) -> None:
        self._op, self._norm, self._backend, self._total = op, norm, backend, total

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x if self._norm is None else apply_norm(self._backend, x, self._norm)
        self._total.addmm_(rows.t(), rows)
        return self._op(x, residual)


class _WindowAttention:
    """Implements Attention for one window, whose K and V are the only ones."""

    def __init__(
        self, layers: Sequence[AttentionLayer], backend: Backend, states: RecordStates
    ) -> None:
        """states: those of layers that have some."""
        self._layers, self._backend, self.states = layers, backend, states

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        shape = self._layers[ticket.layer]
        assert k is not None, "no layer reads the K/V of another"
        k = rotate_keys(self._backend, shape, k, rotation)
        keys, values = (x.transpose(0, 1)[None] for x in (k, k if v is None else v))
        part = self._backend.prefill_attention(
            ticket.q,
            KeyValues(keys, values),
            shape.scale,
            shape.window,
            soft_cap=shape.soft_cap,
            sinks=None if shape.sinks is None else torch.tensor(shape.sinks),
        )
        return Finished(values_of(shape, part.out).to(ticket.q.dtype))
