"""A model and a memory node whose calls take given seconds: the injected costs of overlap.py.

Products sleep, and so does the engine while it waits for the node. The computed numbers are those
of the real model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from memory.attention.seam import Attention, AttentionStep, PlannedAttention, Rotation, Ticket
from ops import LinearOp
from serve.models import Decoder
from serve.models.layers.blocks import AttentionWeights, DenseMlp

ROWS = 8
MS = 1e-3


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of one layer with ROWS rows. fixed_share: the share of a product's time that
    does not depend on the number of rows."""

    q_s: float = 2 * MS
    kv_s: float = 4 * MS
    rest_s: float = 2 * MS
    prefix_s: float = 1 * MS
    delay_s: float = 0.0
    bytes_per_s: float = 1e9
    fixed_share: float = 0.0

    @property
    def model_s(self) -> float:
        return self.q_s + self.kv_s + self.rest_s


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None: ...

    def turn_back(self, moment: float) -> None:
        """Discounts the time since `moment`."""


class RealClock:
    """This machine's clock. A thread that wakes up late sleeps for less the next time, as a device
    would not have waited, so that a step is off by one late awakening and not by the sum of all.
    Discounted time shortens later sleeps in the same way."""

    def __init__(self) -> None:
        self._late = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._late

    def sleep_until(self, moment: float) -> None:
        if moment <= self.now():
            return
        left = moment - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._late = max(0.0, time.perf_counter() - moment)

    def turn_back(self, moment: float) -> None:
        self._late += self.now() - moment


class VirtualClock:
    """A clock on which nothing but sleeping takes time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def turn_back(self, moment: float) -> None:
        """Does nothing, since computing takes no time on this clock."""


class TimedOp:
    """A product whose result for ROWS rows is ready `seconds` after its call."""

    def __init__(self, op: LinearOp, seconds: float, costs: Costs, clock: Clock) -> None:
        self.inner, self._seconds, self._clock = op, seconds, clock
        self._fixed = costs.fixed_share

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        began = self._clock.now()
        out = self.inner(x, residual)
        share = self._fixed + (1 - self._fixed) * len(x) / ROWS
        self._clock.sleep_until(began + self._seconds * share)
        return out


def slow_down(model: Decoder, costs: Costs, clock: Clock) -> None:
    """Gives their injected times to the products of a model that computes q first (q, then k and
    v, then three products after attention)."""
    rest = costs.rest_s / 3
    for block in model.weights.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, AttentionWeights)
        assert isinstance(mlp, DenseMlp)
        assert attention.q is not None, "loaded with q_first"
        assert attention.qkv is not None
        attention.q = TimedOp(attention.q, costs.q_s, costs, clock)
        attention.qkv = TimedOp(attention.qkv, costs.kv_s, costs, clock)
        attention.o = TimedOp(attention.o, rest, costs, clock)
        mlp.up, mlp.down = (TimedOp(op, rest, costs, clock) for op in (mlp.up, mlp.down))


class LinkDirection:
    """One direction of a link, which sends one message after the other and delays each."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._free = 0.0

    def arrival(self, sent: float, num_bytes: int) -> float:
        """Returns when a message that is sent at `sent` arrives."""
        self._free = max(sent, self._free) + num_bytes / self._costs.bytes_per_s
        return self._free + self._costs.delay_s


class TimedNode:
    """A PlannedAttention that computes its numbers in this process and takes the time of one node,
    which attends for one batch after the other."""

    is_remote = True

    def __init__(self, inner: PlannedAttention, costs: Costs, clock: Clock) -> None:
        self.inner, self.costs, self.clock = inner, costs, clock
        self.to_node, self.from_node = LinkDirection(costs), LinkDirection(costs)
        self._free = 0.0

    def plan(self, step: AttentionStep) -> TimedPlan:
        return TimedPlan(self, self.inner.plan(step))

    def done_at(self, arrived: float, num_rows: int) -> float:
        """Returns when the node has attended over the keys before the step."""
        self._free = max(arrived, self._free) + self.costs.prefix_s * num_rows / ROWS
        return self._free


class TimedPlan:
    """The plan of a step over a TimedNode."""

    def __init__(self, node: TimedNode, inner: Attention) -> None:
        self._node, self._inner = node, inner
        self._done_at = 0.0  # with the keys before the step

    def begin(self, layer: int, q: Tensor) -> Ticket:
        node = self._node
        arrived = node.to_node.arrival(node.clock.now(), q.nbytes)
        self._done_at = node.done_at(arrived, len(q))
        return self._inner.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> TimedPending:
        node, clock = self._node, self._node.clock
        arrived = node.to_node.arrival(clock.now(), sum(x.nbytes for x in (k, v) if x is not None))
        answer_at = node.from_node.arrival(max(arrived, self._done_at), ticket.q.nbytes)
        began = clock.now()
        out = self._inner.finish(ticket, k, v, rotation).wait()
        clock.turn_back(began)  # on a real node the engine would not compute this
        return TimedPending(out, answer_at, clock)


@dataclass(slots=True)
class TimedPending:
    """A result that may be used from `moment` on."""

    out: Tensor
    moment: float
    clock: Clock

    def wait(self) -> Tensor:
        self.clock.sleep_until(self.moment)
        return self.out
