"""A model class of Transformers as the runner sees a model: slices, logits, stages."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from memory.attention.seam import Attention, AttentionLayer, Finished, Rotation, Ticket
from ops.backend import Backend
from serve.converter.capture import Captured, capture
from serve.converter.cut import Cut, find_cuts
from serve.converter.graph import Graph, read_graph
from serve.converter.interface import unsupported
from serve.converter.program import Product
from serve.converter.spec import attention_layers, make_spec
from serve.converter.stage import Stage, Weights, hidden_to_logits
from serve.converter.weights import Packing, WeightReader
from serve.models import ModelSpec
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import Slices
from serve.models.progress import LoadProgress
from serve.models.random_checkpoint import RandomCheckpoint
from serve.models.tensors import MakeLinear
from serve.models.weights import joining

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 0.01}  # of the largest value; a dependence is of its size
_COARSE_TOLERANCE = 0.2


@dataclass(slots=True)
class Exported:
    """A model without weights. dtype: the type it computes in."""

    path: Path
    dtype: torch.dtype
    captured: Captured
    graph: Graph
    cuts: list[Cut]
    spec: ModelSpec


def export(path: Path, dtype: torch.dtype) -> Exported:
    """Exports the model of a Hugging Face directory. ModelLoadError says what is not supported."""
    started_s = time.perf_counter()
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
    """An exported model with its weights. The attention object it is given holds the K/V."""

    def __init__(self, exported: Exported, weights: Weights, device: torch.device) -> None:
        self.spec = exported.spec
        self.dtype = exported.dtype
        self.device = device
        self._graph, self._cuts, self._weights = exported.graph, exported.cuts, weights
        self._whole = self.stage(0, self.spec.num_layers)
        self._head = hidden_to_logits(exported.graph, weights)

    @property
    def products(self) -> dict[str, Product]:
        """The packed products by the names of their weights."""
        found = self._weights.functions.items()
        return {v.inputs[1].tensor: x for v, x in found if isinstance(x, Product)}

    def attention_layers(self) -> list[AttentionLayer]:
        return attention_layers(self._graph, self._weights.constants)

    def stage(self, first: int, count: int) -> Stage:
        """Returns `count` attentions, from number `first` on, with what comes before and after."""
        return Stage(self._graph, self._cuts, self._weights, first, count)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Returns [T, hidden], the input of the last product, for input_ids, positions: [T]."""
        slices = self.slices(input_ids, positions, attention)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def slices(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Slices:
        """Yields before each wait for attention, then returns `forward`'s result."""
        ids = input_ids.unsqueeze(0)
        hidden: Tensor = (yield from self._whole.slices([ids], positions, attention))[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [R, vocab] fp32 for hidden: [R, hidden] of `forward`."""
        return self._head(hidden.unsqueeze(0))[0].float()

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
) -> ConvertedModel:
    """Reads the weights of an exported model; the arguments are those of `load_model`.

    ModelLoadError says what is wrong with the checkpoint, or that rows depend on one another
    other than by attention, as in models with a state.
    """
    path, spec, dtype = exported.path, exported.spec, exported.dtype
    checkpoint = RandomCheckpoint(path, backend.device) if is_random else Checkpoint(path)
    make_linear = make_linear or joining(backend.pack_linear)
    packing = Packing(
        dtype, None if keep_weight_dtype else dtype, make_linear, make_head or make_linear
    )
    reader = WeightReader(exported.captured, exported.graph, checkpoint, packing)
    reader.check(spec.num_layers)
    with torch.inference_mode():
        weights = reader.read(spec, progress or LoadProgress())
        model = ConvertedModel(exported, weights, backend.device)
        _check_rows(model, exported.captured.class_name)
    return model


class _OwnKeys:
    """Attention in which a row sees only its own key, so that it must not depend on its batch."""

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        assert v is not None, "every attention of a converted model has values"
        return Finished(v.repeat_interleave(ticket.q.shape[1] // v.shape[1], 1))


def _check_rows(model: ConvertedModel, class_name: str) -> None:
    """Raises ModelLoadError if a row's result depends on the rows beside it."""
    last = model.spec.max_model_len - 1  # where rotations that follow the longest row would differ
    positions = torch.tensor([0, last, last // 2])
    ids = torch.arange(len(positions)) % model.spec.vocab_size
    together = model.forward(ids, positions, _OwnKeys())
    apart = torch.cat(
        [
            model.forward(ids[i : i + 1], positions[i : i + 1], _OwnKeys())
            for i in range(len(positions))
        ]
    )
    allowed = _TOLERANCE.get(model.dtype, _COARSE_TOLERANCE) * float(together.abs().max())
    if not float((together - apart).abs().max()) <= allowed:
        raise unsupported(f"rows that depend on others outside of attention ({class_name})")
