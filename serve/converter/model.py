"""A model class of Transformers as the runner sees a model: slices, logits, stages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from memory.attention.seam import Attention, AttentionLayer, Finished, Rotation, Ticket
from ops.backend import Backend, LinearOp
from ops.sharded import LateExchange
from serve.converter.capture import Captured, capture
from serve.converter.cut import Cut, find_cuts
from serve.converter.graph import Graph, Value, read_graph
from serve.converter.interface import unsupported
from serve.converter.program import Product
from serve.converter.spec import attention_layers, make_spec
from serve.converter.stage import Stage, Weights, head_values, hidden_to_logits, stage_values
from serve.converter.weights import Packing, WeightReader
from serve.models import ModelSpec
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import Slices
from serve.models.progress import LoadProgress
from serve.models.random_checkpoint import RandomCheckpoint
from serve.models.shard import WHOLE, Shard
from serve.models.tensors import MakeLinear
from serve.models.weights import joining

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 0.01}  # of the largest value; a dependence is of its size
_COARSE_TOLERANCE = 0.2
_exporting = threading.Lock()  # torch.export is not for several threads


@dataclass(slots=True)
class Exported:
    """A model without weights. dtype: the type it computes in."""

    path: Path
    dtype: torch.dtype
    captured: Captured
    graph: Graph
    cuts: list[Cut]
    spec: ModelSpec

    @property
    def stage_starts(self) -> list[int]:
        """The attentions with which a stage of a pipeline can begin: all but those to which more
        than a hidden state, or something else, is carried."""
        sizes = [cut.row_size(self.graph.ids) for cut in self.cuts[:-1]]
        most = self.spec.hidden_size
        return [0] + [i for i, size in enumerate(sizes) if i and size is not None and size <= most]


def export(path: Path, dtype: torch.dtype) -> Exported:
    """Exports the model of a Hugging Face directory. ModelLoadError says what is not supported."""
    started_s = time.perf_counter()
    with _exporting:
        captured = capture(path, dtype)
    graph = read_graph(captured)
    cuts = find_cuts(graph)
    logger.info(
        "converter: %s is %d operators in %d slices, exported in %.1f s; %s",
        captured.class_name,
        len(graph.values),
        len(cuts),
        time.perf_counter() - started_s,
        _largest(cuts),
    )
    return Exported(path, dtype, captured, graph, cuts, make_spec(path, captured, graph))


def _largest(cuts: list[Cut]) -> str:
    """Returns what is carried from slice to slice, in words."""
    if len(cuts) < 3:
        return "one attention"
    sizes = [sum(value.row_bytes or 0 for value in cut.carried) for cut in cuts[1:-1]]
    count = max(len(cut.carried) for cut in cuts[1:-1])
    return f"{count} tensor{'s' * (count > 1)} of {max(sizes)} bytes a row between slices"


class ConvertedModel:
    """An exported model with its weights, or a shard of it. The attention object it is given holds
    the K/V."""

    draft_head = None  # none is loaded with it

    def __init__(self, exported: Exported, weights: Weights, device: torch.device) -> None:
        shard, whole = weights.shard, exported.spec
        self.spec = shard.spec(whole)
        self.dtype = exported.dtype
        self.device = device
        self._graph, self._cuts, self._weights = exported.graph, exported.cuts, weights
        self._first = shard.numbers(whole.num_layers).start
        self._own = self.stage(self._first, self.spec.num_layers)
        self._logits, self._last_product = None, None
        if shard.is_last(whole.num_layers):
            self._logits = hidden_to_logits(exported.graph, weights)
            self._last_product = self.products[exported.captured.head]

    @property
    def products(self) -> dict[str, Product]:
        """The packed products by the names of their weights."""
        found = self._weights.functions.items()
        return {v.inputs[1].tensor: x for v, x in found if isinstance(x, Product)}

    @property
    def head(self) -> LinearOp | None:
        """The last product; None in a stage before the last one."""
        return None if self._last_product is None else self._last_product.op

    @head.setter
    def head(self, op: LinearOp) -> None:
        assert self._last_product is not None, "the last stage computes logits"
        self._last_product.op = op

    def attention_layers(self) -> list[AttentionLayer]:
        return attention_layers(self._graph, self._weights.constants, self._weights.shard)

    def stage(self, first: int, count: int) -> Stage:
        """Returns `count` attentions, from number `first` on, with what comes before and after.
        Attention is called with the numbers of this shard's layers."""
        return Stage(
            self._graph, self._cuts, self._weights, first, count, numbered_from=self._first
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, hidden], the input of the last product, for input_ids, positions: [T].

        A stage before the last one returns the rows that the next one needs. hidden: those of the
        stage before.
        """
        slices = self.slices(input_ids, positions, attention, hidden)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                found: Tensor = end.value
                return found

    def slices(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        hidden: Tensor | None = None,
    ) -> Slices:
        """Yields before each wait for attention, then returns `forward`'s result."""
        carried = self._received(input_ids, hidden)
        out: list[Tensor] = yield from self._own.slices(carried, positions, attention)
        rows = [x.reshape(len(positions), -1) for x in self._without_ids(out)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def _received(self, input_ids: Tensor, hidden: Tensor | None) -> list[Tensor]:
        """Returns what the stage begins with. ValueError for rows of another model."""
        cut, ids = self._cuts[self._first], self._graph.ids
        expected = cut.row_size(ids) or 0
        num_sent = 0 if hidden is None else hidden.shape[1]
        if num_sent != expected:
            raise ValueError(f"rows of {num_sent} numbers from the stage before, not {expected}")
        found, at = [], 0
        for value in cut.carried:
            if value is ids:
                found.append(input_ids.unsqueeze(0))
                continue
            assert hidden is not None and value.shape is not None, "checked by row_size"
            size = prod(value.shape[2:])
            part = hidden[:, at : at + size]
            found.append(part.reshape(1, len(hidden), *value.shape[2:]))
            at += size
        return found

    def _without_ids(self, out: Sequence[Tensor]) -> list[Tensor]:
        carried = self._cuts[self._first + self.spec.num_layers].carried
        return [x for x, value in zip(out, carried, strict=True) if value is not self._graph.ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [R, vocab] fp32 for hidden: [R, hidden] of `forward`."""
        assert self._logits is not None, "the last stage computes logits"
        return self._logits(hidden.unsqueeze(0))[0].float()

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the head's input, which is the hidden state of `forward`."""
        return hidden


def load_converted(
    exported: Exported,
    *,
    backend: Backend,
    make_linear: MakeLinear | None = None,
    make_head: MakeLinear | None = None,
    keep_weight_dtype: bool = False,
    is_random: bool = False,
    progress: LoadProgress | None = None,
    shard: Shard = WHOLE,
) -> ConvertedModel:
    """Reads the weights of an exported model, or of a shard; the arguments are those of
    `load_model`.

    ModelLoadError says what is wrong with the checkpoint, or that rows depend on one another
    other than by attention, as in models with a state.
    """
    path, spec, dtype = exported.path, exported.spec, exported.dtype
    checkpoint = RandomCheckpoint(path, backend.device) if is_random else Checkpoint(path)
    make_linear = make_linear or joining(backend.pack_linear)
    packing = Packing(
        dtype, None if keep_weight_dtype else dtype, make_linear, make_head or make_linear
    )
    late = None
    if isinstance(shard.exchange, LateExchange):
        late = shard.exchange
    elif shard.exchange is not None:
        late = LateExchange(shard.rank, shard.size, shard.exchange)
        shard = replace(shard, exchange=late)
    reader = WeightReader(exported.captured, exported.graph, checkpoint, packing, shard)
    reader.check(spec.num_layers)
    with torch.inference_mode():
        weights = reader.read(spec, _used(exported, shard), progress or LoadProgress())
        model = ConvertedModel(exported, weights, backend.device)
        with nullcontext() if late is None else late.alone(backend.device):
            _check_rows(model, exported, shard)
    return model


def _used(exported: Exported, shard: Shard) -> set[Value]:
    """Returns the values that a shard computes."""
    graph, numbers = exported.graph, shard.numbers(exported.spec.num_layers)
    parts = [*stage_values(graph, exported.cuts, numbers.start, len(numbers))]
    if shard.is_last(exported.spec.num_layers):
        parts += head_values(graph)
    return {value for part in parts for value in part}


class _OwnKeys:
    """Attention in which a row sees only its own key, so that it must not depend on its batch."""

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        assert v is not None, "every attention of a converted model has values"
        return Finished(v.repeat_interleave(ticket.q.shape[1] // v.shape[1], 1))


def _check_rows(model: ConvertedModel, exported: Exported, shard: Shard) -> None:
    """Raises ModelLoadError if a row's result depends on the rows beside it."""
    begin = exported.cuts[shard.numbers(exported.spec.num_layers).start]
    last = model.spec.max_model_len - 1  # where rotations that follow the longest row would differ
    positions = torch.tensor([0, last, last // 2])
    ids = torch.arange(len(positions)) % model.spec.vocab_size
    size, dtype = begin.row_size(exported.graph.ids), begin.carried[-1].dtype
    hidden = None
    if size is not None:  # of a stage before this one
        made = torch.Generator().manual_seed(0)
        hidden = torch.randn(len(ids), size, generator=made).to(dtype)
    together = model.forward(ids, positions, _OwnKeys(), hidden)
    apart = torch.cat(
        [
            model.forward(
                ids[i : i + 1],
                positions[i : i + 1],
                _OwnKeys(),
                None if hidden is None else hidden[i : i + 1],
            )
            for i in range(len(positions))
        ]
    )
    allowed = _TOLERANCE.get(model.dtype, _COARSE_TOLERANCE) * float(together.abs().max())
    if not float((together - apart).abs().max()) <= allowed:
        name = exported.captured.class_name
        raise unsupported(f"rows that depend on others outside of attention ({name})")
