"""The connection to Ray: nodes, reserved room, and actors. The only module of the command that
imports Ray, in `connect`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from typing import Any, NamedTuple, Protocol

from serve.cluster.placement import Node, Shape
from serve.cluster.rank_actor import RankActor, RankState
from serve.cluster.rank_process import RankSpec
from serve.errors import ConfigError, MergestepError, reason

_CONNECT_S = 5.0
_KILL_S = 5.0


class Lost(NamedTuple):
    """An actor that does not answer. is_final: Ray does not restart it."""

    reason: str
    is_final: bool


class Seat(Protocol):
    """A rank's actor, as the supervisor sees it."""

    def poll(self, spec: RankSpec | None) -> RankState | Lost | None:
        """Has the actor `sync` with a spec, without a wait. Returns the answer to an earlier call;
        None if there is none yet."""

    def send_signal(self, number: int) -> None: ...

    def close(self, wait_s: float) -> None:
        """Ends the rank's process and the actor."""


class Room(Protocol):
    """What is reserved for a replica."""

    def is_there(self, wait_s: float) -> bool: ...

    def seat(self, rank: int) -> Seat: ...

    def close(self) -> None: ...


class Cluster(Protocol):
    def nodes(self) -> list[Node]: ...

    def reserve(self, shape: Shape) -> Room: ...


class RayCluster:
    """A Cluster on Ray."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def nodes(self) -> list[Node]:
        """Returns the living nodes with their free CPUs."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        found = [
            Node(node["NodeID"], node["NodeManagerAddress"], free[node["NodeID"]].get("CPU", 0.0))
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] in free
        ]
        return sorted(found, key=lambda node: (node.address, node.id))

    def reserve(self, shape: Shape) -> RayRoom:
        return RayRoom(self._ray, shape)

    def close(self) -> None:
        self._ray.shutdown()


class RayRoom:
    """A placement group with a bundle for each stage, the last stage first."""

    def __init__(self, ray: Any, shape: Shape) -> None:
        self._ray = ray
        self._shape = shape
        bundles = [{"CPU": float(shape.stage_cpus)} for _ in range(shape.num_stages)]
        self._group = ray.util.placement_group(bundles, strategy="SPREAD")

    def is_there(self, wait_s: float) -> bool:
        return bool(self._group.wait(wait_s))

    def seat(self, rank: int) -> RaySeat:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._shape.bundle(rank)
        )
        actor = self._ray.remote(RankActor).options(
            num_cpus=self._shape.cpus, max_restarts=-1, scheduling_strategy=strategy
        )
        return RaySeat(self._ray, actor.remote())

    def close(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)


class RaySeat:
    """A Seat on Ray. At most one call waits: a node that does not answer holds up nothing."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._waiting: Any = None

    def poll(self, spec: RankSpec | None) -> RankState | Lost | None:
        if self._waiting is None:
            self._waiting = self._actor.sync.remote(spec)
            return None
        done, _ = self._ray.wait([self._waiting], timeout=0)
        if not done:
            return None
        call, self._waiting = self._waiting, None
        try:
            state: RankState = self._ray.get(call)
        except self._ray.exceptions.ActorDiedError as error:
            return Lost(_first_line(error), is_final=True)
        except self._ray.exceptions.RayError as error:
            return Lost(_first_line(error), is_final=False)
        return state

    def send_signal(self, number: int) -> None:
        self._actor.send_signal.remote(number)

    def close(self, wait_s: float) -> None:
        call = self._actor.kill.remote()
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(call, timeout=wait_s)
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)


def connect(address: str) -> RayCluster:
    """Connects to the cluster of this machine ("auto"), to that of HOST:PORT, or starts one on this
    machine alone that ends with this process ("local").

    ConfigError if Ray is not installed or the address is wrong; MergestepError if no cluster
    answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "serve cluster needs Ray, of the extra `ray`: pip install 'mergestep[ray]'"
        ) from error
    if address not in ("auto", "local"):
        _check_reachable(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet["include_dashboard"] = False
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise MergestepError(f"ray_address {address}: {_first_line(error)}") from error
    return RayCluster(ray)


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"ray_address {address} must be auto, local or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise MergestepError(f"ray_address {address} cannot be reached: {text}") from error


def _first_line(error: BaseException) -> str:
    """Returns the text of one of Ray's errors, whose first line may be only a kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def close_all(seats: list[Seat]) -> None:
    """Ends all ranks; waits a few seconds for all of them together."""
    end_s = time.monotonic() + _KILL_S
    for seat in seats:
        seat.close(max(0.1, end_s - time.monotonic()))
