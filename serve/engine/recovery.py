"""What the loop asks of whoever recovers K/V that memory nodes or other ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memory.nodes.node_link import NodesLostError
from memory.nodes.node_set import NodeSet
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence


class Recovery(Protocol):
    """Recovers from lost K/V. Only the loop's thread calls it, except `interrupt`."""

    num_recomputed: int  # sequences

    @property
    def nodes(self) -> NodeSet | None:
        """The memory nodes; None where ranks hold the K/V."""

    @property
    def is_short(self) -> bool:
        """There is memory, but too little for a sequence of full length."""

    def handle_loss(self, error: NodesLostError) -> None:
        """Releases what was lost, after a step has failed because of it."""

    def update_nodes(self) -> bool:
        """Returns whether there is memory to compute with. The loop calls it before each step and
        when it is idle."""

    def interrupt(self) -> None:
        """Ends a wait within a step. Any thread may call it."""

    def close(self) -> None:
        """Ends its threads."""


MakeRecovery = Callable[[Scheduler, Callable[[Sequence, FinishReason, str], None]], Recovery]
"""Makes it from the scheduler and what ends a sequence with an error."""
