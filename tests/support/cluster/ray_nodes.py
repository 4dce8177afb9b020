"""Ray nodes on this machine, in a process of their own.

`python -m tests.support.cluster.ray_nodes CPUS CPUS ...` starts a node for each number and prints
"address ADDRESS NODE_ID NODE_ID ...". Each line "kill N" of its standard input kills node N with
all its processes, and is answered with "killed"; the end of the input ends the cluster.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


def main(cpus: list[int]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": 80 << 20}
    head = common | {"num_cpus": cpus[0], "include_dashboard": False, "_system_config": _HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.head_node]
        nodes += [cluster.add_node(num_cpus=number, **common) for number in cpus[1:]]
        print("address", cluster.address, *(node.node_id for node in nodes), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line.split()[1])], allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
