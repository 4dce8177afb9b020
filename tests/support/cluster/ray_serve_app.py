"""Runs our application on a Ray of this process, until its standard input ends.

`python -m tests.support.cluster.ray_serve_app PORT ARGS` prints "ready" when it takes calls; ARGS
is JSON. On each line of its input it prints the numbers of servers by state.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    from serve.cluster.ray_serve.app import build_app

    port, args = int(sys.argv[1]), json.loads(sys.argv[2])
    ray.init(
        num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(args), name="model")
    print("ready", flush=True)
    for _ in sys.stdin:
        servers = serve.status().applications["model"].deployments["Server"]
        states = {str(getattr(k, "value", k)): n for k, n in servers.replica_states.items()}
        print(json.dumps(states), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
