"""The number of replicas, from the wait that they predict: a policy of Ray Serve's autoscaler."""

from __future__ import annotations

import statistics
from typing import Any

from serve.cluster.scaling import Scaling, ScalingLimits

QUEUE = "predicted_queue_seconds"
"""The name under which replicas report the wait."""


class QueuePolicy:
    """Ray Serve's controller makes it, and calls it again and again with what it knows."""

    def __init__(self, **limits: Any) -> None:
        """limits: the fields of ScalingLimits but `least` and `most`, which are Ray's."""
        self._limits = limits
        self._scaling: Scaling | None = None
        self._range = (0, 0)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Ray's AutoscalingContext."""
        least = context.capacity_adjusted_min_replicas
        most = context.capacity_adjusted_max_replicas
        if self._scaling is None or self._range != (least, most):
            self._scaling = Scaling(ScalingLimits(least, most, **self._limits))
            self._range = (least, most)
        metrics = (context.aggregated_metrics or {}).get(QUEUE, {})
        running = {str(replica) for replica in context.running_replicas}
        waits = [wait for replica, wait in metrics.items() if str(replica) in running]
        wanted = self._scaling.wanted(
            context.current_time,
            context.target_num_replicas,
            len(waits),
            statistics.fmean(waits) if waits else 0.0,
            int(context.total_num_requests),
        )
        return min(max(wanted, least), most), {}
