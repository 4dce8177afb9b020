"""`serve cluster` in the foreground: connects, places, supervises until a signal, and cleans up."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve.cluster.fleet import Fleet
from serve.cluster.placement import Shape, choose_cpus, place_stages, placement_lines, too_few
from serve.cluster.ray_cluster import Cluster, connect
from serve.cluster.replica import Content, Replica
from serve.cluster.scaling import ScalingLimits
from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings

_POLL_S = 0.1
_COLD_S = 600.0  # how long a call waits for the replica that it has started
_MORE_ROOM_S = 5.0
_STEADY_POLL_S = 0.25  # once it serves


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What `serve cluster` is asked for.

    cpus_per_rank: None takes all that are free. placement_timeout_s: how long to wait for room.
    drain_s: how long a stop waits for running requests. make_content: what ranks with so many CPUs
    run. is_quiet: one line, and no log. scaling: with more than one replica, http
    has the settings of the hop before them.
    """

    tensor: int
    num_stages: int
    make_content: Callable[[int], Content]
    ray_address: str = "auto"
    cpus_per_rank: int | None = None
    placement_timeout_s: float = 60.0
    drain_s: float = 30.0
    scaling: ScalingLimits = field(default_factory=ScalingLimits)
    http: HttpSettings = field(default_factory=HttpSettings)
    is_dry_run: bool = False
    is_quiet: bool = False

    @property
    def has_fleet(self) -> bool:
        return self.scaling.most > 1 or self.scaling.least == 0


def run_cluster(options: ClusterOptions) -> int:
    """Serves until a signal; returns the exit status. Raises ConfigError and MergestepError."""
    cluster = connect(options.ray_address)
    try:
        if options.is_dry_run:
            _print_plan(cluster, _shape(cluster, options))
            return 0
        with counted_signals() as signals:
            shape = _await_shape(cluster, options, signals)
            if options.has_fleet:
                return serve_fleet(cluster, shape, options, signals)
            return serve_replica(cluster, shape, options, signals)
    finally:
        cluster.close()


def serve_replica(
    cluster: Cluster, shape: Shape, options: ClusterOptions, signals: list[int]
) -> int:
    """Runs one replica until `signals` has a signal; returns the exit status of the command."""

    def say(line: str) -> None:
        if not options.is_quiet:
            print(line, file=sys.stderr, flush=True)

    replica = Replica(cluster, shape, options.make_content(shape.cpus), say)
    shown = ""
    began_s = time.monotonic()
    try:
        replica.place(options.placement_timeout_s, lambda: bool(signals))
        while not signals:
            replica.step()
            if replica.is_ready and replica.http_url != shown:
                shown = replica.http_url
                _print_ready(replica, time.monotonic() - began_s, is_quiet=options.is_quiet)
            time.sleep(_STEADY_POLL_S if shown else _POLL_S)
        say("stopping: rank 0 ends its requests first")
        replica.drain(options.drain_s, lambda: len(signals))
    finally:
        replica.close()
    return 0 if shown else 128 + signals[0]


def serve_fleet(cluster: Cluster, shape: Shape, options: ClusterOptions, signals: list[int]) -> int:
    """Runs several replicas behind a hop until `signals` has a signal; SIGHUP updates them, one
    after the other. Returns the exit status of the command."""
    from serve.cluster.front.front import FrontSettings
    from serve.cluster.front.front_thread import FrontThread

    def say(line: str) -> None:
        if not options.is_quiet:
            print(line, file=sys.stderr, flush=True)

    content = options.make_content(shape.cpus)

    def make(number: int) -> Replica:
        replica = Replica(cluster, shape, content, lambda line: say(f"replica {number}: {line}"))
        # beside replicas that serve, which are not looked after meanwhile
        wait_s = _MORE_ROOM_S if fleet.num_ready else options.placement_timeout_s
        try:
            replica.place(wait_s, lambda: bool(signals))
        except BaseException:
            replica.close()  # else its room stays reserved
            raise
        return replica

    starts_cold = options.scaling.least == 0
    wait_s = _COLD_S if starts_cold else FrontSettings(()).wait_s
    front = FrontThread(FrontSettings((), wait_s=wait_s), options.http)
    front.start()
    if starts_cold:
        print(f"listening at {front.url}/v1, the first call starts a replica", flush=True)
    is_shown = False
    began_s = time.monotonic()
    hangups: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
    fleet = Fleet((), front, say, make, options.scaling)
    try:
        while not signals:
            fleet.step()
            if fleet.num_ready and not is_shown:
                is_shown = True
                load_s = time.monotonic() - began_s
                print(f"ready at {front.url}/v1", flush=True)
                say(f"  {len(fleet.replicas)} replicas, the first ready in {load_s:.1f} s")
            if hangups and not fleet.is_updating:
                hangups.clear()
                fleet.update()
            time.sleep(_STEADY_POLL_S if is_shown else _POLL_S)
        say("stopping: the replicas end their requests first")
        front.drain()
        end_s = time.monotonic() + options.drain_s
        while front.num_calls and time.monotonic() < end_s and len(signals) < 2:
            time.sleep(_POLL_S)
    finally:
        signal.signal(signal.SIGHUP, before)
        front.stop()
        fleet.close()
    return 0 if is_shown or starts_cold else 128 + signals[0]


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """Inside, SIGTERM and SIGINT are only noted in the list."""
    signals: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [(each, signal.signal(each, lambda n, _: signals.append(n))) for each in numbers]
    try:
        yield signals
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _shape(cluster: Cluster, options: ClusterOptions) -> Shape:
    tensor, num_stages = options.tensor, options.num_stages
    cpus = options.cpus_per_rank or choose_cpus(cluster.nodes(), tensor, num_stages)
    return Shape(tensor, num_stages, cpus)


def _await_shape(cluster: Cluster, options: ClusterOptions, signals: Sequence[int]) -> Shape:
    """Returns the shape once the cluster has room for it. ConfigError if it has none in time."""
    end_s = time.monotonic() + options.placement_timeout_s
    while True:
        try:
            return _shape(cluster, options)
        except ConfigError:
            if signals or time.monotonic() > end_s:
                raise
        time.sleep(_STEADY_POLL_S)


def _print_plan(cluster: Cluster, shape: Shape) -> None:
    nodes = cluster.nodes()
    places = place_stages(nodes, shape)
    if places is None:
        raise too_few(nodes, shape)
    print("\n".join(placement_lines(shape, places)))
    print("Nothing is started. Among nodes with equal room, Ray may choose another one.")


def _print_ready(replica: Replica, load_s: float, *, is_quiet: bool) -> None:
    url, shape, places = replica.http_url, replica.shape, replica.places()
    print(f"ready at {url}/v1", flush=True)
    if is_quiet:
        return
    is_near = any(name in url for name in ("//127.", "//localhost", "//[::1]"))
    reach = f" (only on {places[0].name}; --host 0.0.0.0 for other machines)" if is_near else ""
    nodes = len({place.id for place in places})
    lines = [
        f"API         {url}/v1{reach}",
        f"ranks       {shape.size}, on {nodes} of the cluster's nodes",
        f"started in  {load_s:.1f} s",
        "",
        *placement_lines(shape, places, replica.pids()),
    ]
    print("\n".join(f"  {line}".rstrip() for line in lines), flush=True)
