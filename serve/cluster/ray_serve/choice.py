"""Which replica a call goes to: that of the least predicted time to the first token.

A replica tells how long a call would wait there and what a block of a prompt costs it, computed or
pulled from another replica. Which blocks it holds follows from the calls that it got.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve.cluster.front.prefix_affinity import PrefixAffinity

BLOCK_TOKENS = 64
"""What a block of prefix_affinity.BLOCK_BYTES has of usual text."""
_FIRST_BLOCK_S = 0.02  # until a replica has measured it
_MAX_TRIED = 1024  # calls of which is remembered where they were
_TICK_S = 0.01  # predicted times that differ by less are equal


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica tells about itself. number: of the report. queue_s: how long a call would wait
    before it is computed. block_s: seconds to compute a block; None: not known yet. pull_s: seconds
    to pull one from another replica; None: it pulls none."""

    number: int = 0
    queue_s: float = 0.0
    block_s: float | None = None
    pull_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "queue_s": self.queue_s,
            "block_s": self.block_s,
            "pull_s": self.pull_s,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ReplicaStats:
        """Returns the stats of a report, which is empty until the first one."""
        return cls(
            int(found.get("number", 0)),
            float(found.get("queue_s", 0.0)),
            found.get("block_s"),
            found.get("pull_s"),
        )


@dataclass(slots=True)
class _Sent:
    """What went to a replica since its last report. rank: the number of the last call."""

    number: int = -1
    seconds: float = 0.0
    rank: int = 0


class PredictedChoice:
    """Ranks replicas for prompts, and remembers where these went."""

    def __init__(self) -> None:
        self._affinity = PrefixAffinity()
        self._sent: dict[str, _Sent] = {}
        self._num_calls = 0
        self._tried: OrderedDict[str, set[str]] = OrderedDict()  # replicas by call

    def rank(
        self, stats: Mapping[str, ReplicaStats], names: list[bytes], call: str = ""
    ) -> list[str]:
        """Returns the replicas, the best one first. names: of the prompt's blocks. call: its name,
        if it can go on elsewhere: the replicas where it has been come last."""
        matching = self._affinity.num_matching(names)
        tried = self._tried.get(call, set())

        def key(replica: str) -> tuple[bool, float, int]:
            sent = self._since_report(replica, stats[replica])
            cost_s = self._cost_s(replica, stats[replica], names, matching)
            predicted_s = stats[replica].queue_s + sent.seconds + cost_s
            return replica in tried, round(predicted_s / _TICK_S), sent.rank

        return sorted(stats, key=key)

    def sent(self, replica: str, stats: ReplicaStats, names: list[bytes], call: str = "") -> None:
        """Notes that a call went to a replica."""
        if call:
            self._tried.setdefault(call, set()).add(replica)
            self._tried.move_to_end(call)
            if len(self._tried) > _MAX_TRIED:
                self._tried.popitem(last=False)
        matching = self._affinity.num_matching(names)
        sent = self._since_report(replica, stats)
        sent.seconds += self._cost_s(replica, stats, names, matching)
        self._num_calls += 1
        sent.rank = self._num_calls
        self._affinity.add(names, replica)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forgets all other replicas, whose K/V is gone."""
        for replica in self._sent.keys() - set(replicas):
            del self._sent[replica]
            self._affinity.forget(replica)

    def _cost_s(
        self,
        replica: str,
        stats: ReplicaStats,
        names: list[bytes],
        matching: Mapping[str, int],
    ) -> float:
        """Returns the seconds that a prompt's blocks take on a replica."""
        block_s = _FIRST_BLOCK_S if stats.block_s is None else stats.block_s
        own, elsewhere = matching.get(replica, 0), max(matching.values(), default=0)
        pulled = max(0, elsewhere - own)
        pull_s = block_s if stats.pull_s is None else min(block_s, stats.pull_s)
        return pull_s * pulled + block_s * (len(names) - own - pulled)

    def _since_report(self, replica: str, stats: ReplicaStats) -> _Sent:
        sent = self._sent.setdefault(replica, _Sent())
        if sent.number != stats.number:
            sent.number, sent.seconds = stats.number, 0.0
        return sent
