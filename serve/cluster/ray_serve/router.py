"""The router of Ray Serve for our replicas. Only app.py imports it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from serve.cluster.ray_serve.choice import PredictedChoice, ReplicaStats


class PredictedRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica of the least predicted time to the first token."""

    def initialize_state(self, **_: Any) -> None:
        self._choice = PredictedChoice()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Returns the replicas, each a rank of its own, the best one first."""
        found = {str(replica.replica_id): replica for replica in candidate_replicas}
        stats = {name: _stats_of(replica) for name, replica in found.items()}
        self._choice.keep(stats)
        ranked = self._choice.rank(stats, _names_of(pending_request), _call_of(pending_request))
        return [[found[name]] for name in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            names, call = _names_of(pending_request), _call_of(pending_request)
            self._choice.sent(str(replica_id), _stats_of(replica), names, call)


def _stats_of(replica: Any) -> ReplicaStats:
    return ReplicaStats.from_json(replica.routing_stats or {})


def _names_of(pending_request: Any) -> list[bytes]:
    """Returns the names of a call's blocks; none for calls of another method."""
    return list(_sent_of(pending_request).get("names", ()))


def _call_of(pending_request: Any) -> str:
    """Returns the name of a call that can go on at another replica."""
    return str(_sent_of(pending_request).get("call", ""))


def _sent_of(pending_request: Any) -> dict[str, Any]:
    if pending_request is None or not pending_request.args:
        return {}
    sent = pending_request.args[0]
    return sent if isinstance(sent, dict) else {}
