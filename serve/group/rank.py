"""One rank of a group: its part of the model, its K/V, and how it computes a step.

The engine's own rank and the workers run the same code, in the order of the plans.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy.typing as npt
import torch
from numpy import int64
from torch import Tensor

from memory.edit_recorder import apply_edits
from memory.nodes.rank_links import RankHolders
from memory.pages.linux_vmm import LinuxMemory
from ops.backend import LinearOp
from ops.sharded import AloneExchange, LateExchange
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.base import RankExchange
from serve.group.exchange.staged import StagedExchange
from serve.group.exchange.windows import WindowExchange
from serve.group.grid import Grid
from serve.group.links.messages import PlannedStep
from serve.group.rank_tier import RankTier, open_rank_tier
from serve.group.sizes import BARRIER_DEADLINE_S, largest_result
from serve.loading.model_source import ModelSource, load_part
from serve.loading.rank_memory import KVOfRank, RankGeometry, RankMemory
from serve.machine import available_memory
from serve.models import Decoder, StageModel
from serve.models.progress import LoadProgress
from serve.models.shard import Shard

if TYPE_CHECKING:
    from serve.loading.cuda_rank import RankDevice

HostExchange = ArenaExchange | WindowExchange
_NCCL_BYTES = 512 << 20  # for the buffers of its channels
_QUIET_S = 5.0  # for a disk that reads or writes memory which is to be freed


class RankRoom(NamedTuple):
    """The memory that a rank has beside its weights, in bytes. device: its name, the same for ranks
    that share it; "" for this machine's memory. needed: what the largest step takes of it."""

    device: str
    free: int
    needed: int


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
        self.device: RankDevice | None = None
        if source.precision.backend == "cuda":
            from serve.loading.cuda_rank import RankDevice

            self.device = RankDevice(source, self.shard)
        self.model: StageModel = load_part(source, progress, self.shard, number)
        self.memory: KVOfRank | None = None
        self.tier: RankTier | None = None
        self._grid = grid
        self.room = self._measured()
        self._head = self.model.head

    def _measured(self) -> RankRoom:
        if self.device is None:
            return RankRoom("", available_memory(), 0)
        assert isinstance(self.model, Decoder), "the converter has no device"
        with self.alone():
            if self.device.device.type == "cuda":
                self.device.warm_up(self.model, self.source)
            name, free, needed = self.device.measure(self.model)
            return RankRoom(name, free, needed + self._group_bytes())

    def _group_bytes(self) -> int:
        """Returns what a process group of devices may take beside the steps."""
        config, device = self.source.config, self.device
        if device is None or device.device.type != "cuda" or self.shard.exchange is None:
            return 0
        is_direct = config.group_exchange == "auto"
        return _NCCL_BYTES + 2 * largest_result(config, self.source.spec) if is_direct else 0

    def alone(self) -> AbstractContextManager[None]:
        """Lets the model compute without the other ranks."""
        late = self.shard.exchange
        if not isinstance(late, LateExchange):
            return nullcontext()
        assert self.device is not None
        return late.alone(self.device.device)

    def open(
        self, geometry: RankGeometry, exchange: HostExchange | None, meeting: str | None = None
    ) -> None:
        """Takes memory for K/V, in place of what there was. exchange: None for one tensor rank.
        meeting: a file through which the devices of the stage find one another, if they are to
        exchange directly."""
        self.close()
        config, spec, precision, backend, *_ = self.source
        if self.shard.exchange is not None and exchange is not None:
            assert isinstance(self.shard.exchange, LateExchange)
            self.shard.exchange.inner = self._on_device(exchange, meeting)
        layers = self.model.attention_layers()
        if self.device is None:
            self.memory = RankMemory(
                config, spec, precision, layers, geometry, backend, self.number
            )
            if self.tier is None:
                self.tier = open_rank_tier(self.source, self._grid, self.number, geometry)
            if self.source.peers is not None:
                self.source.peers.listen(self.number)
            return
        from serve.loading.cuda_rank import DeviceKV

        self.memory = DeviceKV(config, spec, precision, layers, geometry, self.device)

    def _on_device(self, exchange: HostExchange, meeting: str | None) -> RankExchange:
        """Returns the exchange of this rank's device by way of the host's."""
        if self.device is None:
            return exchange
        device = self.device.device
        if meeting is None or not isinstance(exchange, ArenaExchange):
            return StagedExchange(exchange, device)
        from serve.group.exchange.direct import DirectExchange, group_opener

        place = device, exchange.rank, exchange.size
        opener = group_opener(meeting, *place, BARRIER_DEADLINE_S / 2)  # it then falls back
        largest = largest_result(self.source.config, self.source.spec)
        return DirectExchange(
            exchange, device, self.device.queue.wait, opener, largest, BARRIER_DEADLINE_S
        )

    def prepare(self) -> None:
        """Connects the devices of the stage, which takes them a while. All ranks call it after
        `open` and `join`. Raises ExchangeError."""
        if self.exchange is not None:
            self.exchange.prepare()

    def settle(self) -> None:
        """Returns when the device has computed a step or logits. Raises ExchangeError if they are
        of no use."""
        if self.device is not None and self.exchange is not None:
            self.exchange.settle()

    @property
    def holders(self) -> RankHolders | None:
        """This rank's sessions on holders of segments."""
        return self.memory.holders if isinstance(self.memory, RankMemory) else None

    def edit(self, edits: npt.NDArray[int64]) -> None:
        """Applies edits of the address space. OSError leaves the memory unusable."""
        assert self.memory is not None, "opened"
        if self.holders is not None:
            edits = self.holders.put(edits)
        if self.tier is not None:
            assert isinstance(self.memory.memory, LinuxMemory), "a tier of this machine's memory"
            self.tier.apply(self.memory.memory, edits.tolist())
        elif len(edits):
            apply_edits(self.memory.memory, edits.tolist())

    @torch.inference_mode()
    def forward(self, step: PlannedStep, hidden: Tensor | None) -> Tensor:
        """Computes the rank's layers for a step whose edits are applied; hidden: the result of the
        stage before."""
        assert self.memory is not None, "opened"
        if self.holders is not None:
            self.holders.use(step.attention, step.places)
        attention = self.memory.attention.plan(step.attention)
        rows = torch.from_numpy(step.input_ids), torch.from_numpy(step.positions)
        if self.device is not None:
            rows = self.device.to_device(rows[0]), self.device.to_device(rows[1])
            hidden = None if hidden is None else self.device.to_device(hidden)
        return self.model.forward(*rows, attention, hidden)

    def on_host(self, hidden: Tensor) -> Tensor:
        """Returns a step's result for the next stage, in memory of this machine that is valid until
        the next step. Raises ExchangeError."""
        return hidden if self.device is None else self.device.to_host(hidden)

    @property
    def exchange(self) -> RankExchange | None:
        late = self.shard.exchange
        inner = late.inner if isinstance(late, LateExchange) else None
        return None if isinstance(inner, AloneExchange) else cast("RankExchange | None", inner)

    def join(self, epoch: int) -> None:
        """Takes part in an epoch, whose exchanges begin anew."""
        if self.exchange is not None:
            self.exchange.join(epoch)

    def abort(self) -> None:
        """Ends the exchanges of this epoch on all ranks of the stage."""
        if self.exchange is not None:
            self.exchange.abort_group()

    def abort_own(self) -> None:
        """Ends a wait for the other ranks of the stage. Any thread may call it."""
        exchange = self.exchange  # the compute thread may close it meanwhile
        if exchange is not None:
            exchange.abort()

    def lead_head(self, head: LinearOp) -> None:
        """Makes the model compute logits with `head`, which has the other ranks compute theirs."""
        self.model.head = head

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
        late = self.shard.exchange
        if isinstance(late, LateExchange):
            exchange, late.inner = self.exchange, None
            if exchange is not None:
                exchange.close()
        if self.memory is not None:
            memory, tier = self.memory.memory, self.tier
            is_used = tier is not None and not tier.is_quiet(_QUIET_S)
            if is_used and isinstance(memory, LinuxMemory):
                memory.keep_pages()
            self.memory.close()
            self.memory = None

    def end(self) -> None:
        """Closes all that the rank has opened. Its weights stay."""
        self.close()
        if self.source.peers is not None:
            self.source.peers.close()
        if self.tier is not None:
            self.tier.close()
            self.tier = None


def shard_of(grid: Grid, number: int) -> Shard:
    """Returns the part of the model that a rank holds."""
    stage, tensor = grid.place(number)
    layers = grid.stages[stage] if grid.num_stages > 1 else None
    exchange = LateExchange(tensor, grid.tensor) if grid.tensor > 1 else None
    return Shard(tensor, grid.tensor, layers, exchange)
