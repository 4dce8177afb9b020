"""The state of one memory node: healthy, late, lost, or in probation.

A late node is slow, but it answers: steps wait for it. A lost node holds no K/V. It is used again
when it has answered every probe for a while, its probation, which is longer after each loss. Losses
are forgotten after a good while. This module knows times alone; it does no input or output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

LATE_FOR_S = 10.0
"""A node is late for so long after its last sign of it."""
MAX_STALLED_S = 8.0
"""A node is given up when steps have waited so long for it without a heartbeat, or beyond the usual
time, less STALL_RATE of the time since."""
STALL_RATE = 0.1
PROBATION_S: tuple[float, ...] = (5.0, 15.0, 45.0, 60.0)
"""The probation after the first loss, the second, ...; the last one is that of all later losses."""
JITTER = 0.2  # a probation is longer by up to this part of it, so that engines come one by one
MIN_PROBES = 3
"""The probes that have to find a node in its probation."""
FORGET_S = 120.0
"""Losses are forgotten when a node has held K/V for so long without another one."""


USUAL_ANSWERS = 32
"""The usual pace of a node is that of so many answers."""
SLOW_FACTOR, SLOW_S = 8.0, 0.5
"""A wait of more than SLOW_S that is so much longer than usual stalls a step, whatever heartbeats
say. What counts is all of it beyond SLOW_FACTOR times the usual time."""


class NodeState(Enum):
    HEALTHY = "healthy"
    LATE = "late"
    LOST = "lost"
    PROBATION = "probation"


MAY_BECOME = {
    NodeState.HEALTHY: {NodeState.LATE, NodeState.LOST},
    NodeState.LATE: {NodeState.HEALTHY, NodeState.LOST},
    NodeState.LOST: {NodeState.PROBATION, NodeState.HEALTHY},
    NodeState.PROBATION: {NodeState.LOST, NodeState.HEALTHY},
}
"""The states that may follow each state. A node is HEALTHY as soon as it holds K/V, and it may have
to take K/V before its probation ends, because there is no other memory."""


class AnswerPace:
    """How long a node's answers take for their work, the products of rows and keys."""

    def __init__(self) -> None:
        self._seconds = self._work = 0.0  # of the last answers; older ones count less

    def _usual_s(self, work: float) -> float:
        return self._seconds * work / self._work if self._work else math.inf

    def stalled_s(self, work: float, waited_s: float) -> float:
        """Returns for how long the wait for an answer has stalled a step; 0 before the first
        answer."""
        expected_s = SLOW_FACTOR * self._usual_s(work)
        return waited_s - expected_s if waited_s >= max(expected_s, SLOW_S) else 0.0

    def learn(self, work: float, seconds: float) -> None:
        """Notes an answer. One that takes long counts as twice the usual time, so that what is
        usual changes little while a node is starved."""
        seconds = min(seconds, 2.0 * self._usual_s(work))
        older = 1.0 - 1.0 / USUAL_ANSWERS
        self._seconds = older * self._seconds + seconds
        self._work = older * self._work + work


class NodeHealth:
    """The events of a node, in the order of their times, and the state that follows from them."""

    def __init__(self, jitter: Callable[[int], float] = lambda num_losses: 0.0) -> None:
        """jitter returns a number from 0 to 1 for a number of losses."""
        self.state = NodeState.HEALTHY
        self.pace = AnswerPace()
        self.num_losses = 0  # that are not forgotten
        self._jitter = jitter
        self._late_at = 0.0
        self._stalled_s = self._stalled_at = 0.0
        self._used_since = 0.0
        self._bad_at = 0.0  # the last time at which it was lost or did not answer a probe
        self._num_probes = 0  # that found it since then
        self._may_retry = False

    @property
    def probation_s(self) -> float:
        """How long the node has to answer every probe before it is used again."""
        usual_s = PROBATION_S[min(max(self.num_losses, 1), len(PROBATION_S)) - 1]
        return usual_s * (1.0 + JITTER * self._jitter(self.num_losses))

    def may_be_used(self, now_s: float) -> bool:
        """Whether K/V may be placed on the node."""
        if self._may_retry:
            return True
        if self.state is NodeState.PROBATION:
            is_over = now_s >= self._bad_at + self.probation_s
            return is_over and self._num_probes >= MIN_PROBES
        return self.state is not NodeState.LOST

    def hold(self, now_s: float) -> None:
        """The node holds K/V from now on."""
        if self.state in (NodeState.LOST, NodeState.PROBATION):
            self.state = NodeState.HEALTHY
            self._used_since = now_s
            self._stalled_s = 0.0
        self._may_retry = False

    def be_late(self, now_s: float) -> None:
        """A node that holds K/V did not answer in time, but it is not lost."""
        if self.state in (NodeState.HEALTHY, NodeState.LATE):
            self.state = NodeState.LATE
            self._late_at = now_s

    def stall(self, now_s: float, seconds: float) -> None:
        """Steps have waited for so long without a heartbeat, or beyond the usual time."""
        self.be_late(now_s)
        passed_s = now_s - self._stalled_at
        self._stalled_s = max(self._stalled_s - STALL_RATE * passed_s, 0.0) + seconds
        self._stalled_at = now_s

    @property
    def stalls_too_often(self) -> bool:
        return self._stalled_s > MAX_STALLED_S

    def update(self, now_s: float) -> None:
        """Lets the time pass."""
        if self.state is NodeState.LATE and now_s >= self._late_at + LATE_FOR_S:
            self.state = NodeState.HEALTHY

    def lose(self, now_s: float, *, was_silent: bool) -> None:
        """The node is lost, and its K/V with it. After a first loss it is tried once more at once,
        unless it was silent: a connection may end although both ends are well."""
        if now_s >= self._used_since + FORGET_S:
            self.num_losses = 0
        self.num_losses += 1
        self._end(now_s)
        self._may_retry = self.num_losses == 1 and not (was_silent or self.stalls_too_often)

    def leave(self, now_s: float) -> None:
        """The node asked the engine to leave it. This is no loss."""
        self._end(now_s)

    def probe(self, now_s: float, *, is_found: bool) -> None:
        """A probe found a node that holds no K/V, or did not; so does an attempt to use it."""
        if not is_found:
            self._end(now_s)
        elif self.state is NodeState.LOST:
            self.state = NodeState.PROBATION
            self._num_probes = 1
        elif self.state is NodeState.PROBATION:
            self._num_probes += 1

    def _end(self, now_s: float) -> None:
        self.state = NodeState.LOST
        self._bad_at = now_s
        self._num_probes = 0
        self._may_retry = False
