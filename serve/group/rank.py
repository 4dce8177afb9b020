"""One rank of a group: its part of the model, its K/V, and how it computes a step.

The engine's own rank and the workers run the same code, in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt
import torch
from numpy import int64
from torch import Tensor

from memory.edit_recorder import apply_edits
from memory.nodes.rank_links import RankHolders
from ops.backend import LinearOp
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.windows import WindowExchange
from serve.group.grid import Grid
from serve.group.messages import PlannedStep
from serve.loading.model_source import ModelSource, load_shard
from serve.loading.rank_memory import RankGeometry, RankMemory
from serve.models import Decoder
from serve.models.progress import LoadProgress
from serve.models.shard import Shard

RankExchange = ArenaExchange | WindowExchange


class LateExchange:
    """The exchange of a shard, which is opened when the weights are loaded."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.inner: RankExchange | None = None

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        assert self.inner is not None, "opened before the first step"
        return self.inner.begin(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        assert self.inner is not None, "opened before the first step"
        self.inner.complete(buffer, bounds)


class Rank:
    """Loads and computes the part of one rank."""

    def __init__(
        self, source: ModelSource, grid: Grid, number: int, progress: LoadProgress
    ) -> None:
        self.number = number
        self.place = grid.place(number)
        self.has_next = self.place.stage + 1 < grid.num_stages
        self.shard = shard_of(grid, number)
        self.source = source
        self.model: Decoder = load_shard(source, progress, self.shard)
        self.memory: RankMemory | None = None
        self._head = self.model.weights.head

    def open(self, geometry: RankGeometry, exchange: RankExchange | None) -> None:
        """Takes memory for K/V, in place of what there was. exchange: None for one tensor rank."""
        self.close()
        config, spec, precision, backend, _ = self.source
        if self.shard.exchange is not None:
            assert isinstance(self.shard.exchange, LateExchange)
            self.shard.exchange.inner = exchange
        layers = self.model.attention_layers()
        self.memory = RankMemory(config, spec, precision, layers, geometry, backend, self.number)

    @property
    def holders(self) -> RankHolders | None:
        """This rank's sessions on holders of segments."""
        return None if self.memory is None else self.memory.holders

    def edit(self, edits: npt.NDArray[int64]) -> None:
        """Applies edits of the address space. OSError leaves the memory unusable."""
        assert self.memory is not None, "opened"
        if self.holders is not None:
            edits = self.holders.put(edits)
        if len(edits):
            apply_edits(self.memory.memory, edits.tolist())

    @torch.inference_mode()
    def forward(self, step: PlannedStep, hidden: Tensor | None) -> Tensor:
        """Computes the rank's layers for a step whose edits are applied; hidden: the result of the
        stage before."""
        assert self.memory is not None, "opened"
        if self.holders is not None:
            self.holders.use(step.attention, step.places)
        attention = self.memory.attention.plan(step.attention)
        return self.model.forward(
            torch.from_numpy(step.input_ids), torch.from_numpy(step.positions), attention, hidden
        )

    @property
    def exchange(self) -> RankExchange | None:
        late = self.shard.exchange
        return late.inner if isinstance(late, LateExchange) else None

    def join(self, epoch: int) -> None:
        """Takes part in an epoch, whose exchanges begin anew."""
        if self.exchange is not None:
            self.exchange.join(epoch)

    def abort(self) -> None:
        """Ends the exchanges of this epoch on all ranks of the stage."""
        if isinstance(self.exchange, WindowExchange):
            self.exchange.abort_group()
        elif self.exchange is not None:
            self.exchange.abort()

    def abort_own(self) -> None:
        """Ends a wait for the other ranks of the stage. Any thread may call it."""
        exchange = self.exchange  # the compute thread may close it meanwhile
        if exchange is not None:
            exchange.abort()

    def lead_head(self, head: LinearOp) -> None:
        """Makes the model compute logits with `head`, which has the other ranks compute theirs."""
        self.model.weights.head = head

    def head(self, num_rows: int, rows: Tensor | None = None) -> Tensor:
        """Computes logits, [num_rows, vocab], with the other tensor ranks. rows: [num_rows,
        hidden], which the first of them has and the others get from it."""
        head, exchange = self._head, self.exchange
        assert head is not None and exchange is not None, "several ranks of the last stage"
        size = self.source.spec.embed_size
        buffer = exchange.begin(num_rows, size, self.model.dtype)
        if rows is not None:
            buffer.copy_(rows)
        exchange.complete(buffer, [0] + [size] * exchange.size)
        logits: Tensor = head(buffer)
        return logits

    def close(self) -> None:
        """Frees the K/V and leaves the exchange; the weights stay."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        exchange = self.shard.exchange
        if isinstance(exchange, LateExchange) and exchange.inner is not None:
            exchange.inner.close()
            exchange.inner = None


def shard_of(grid: Grid, number: int) -> Shard:
    """Returns the part of the model that a rank holds."""
    stage, tensor = grid.place(number)
    layers = grid.stages[stage] if grid.num_stages > 1 else None
    exchange = LateExchange(tensor, grid.tensor) if grid.tensor > 1 else None
    return Shard(tensor, grid.tensor, layers, exchange)
