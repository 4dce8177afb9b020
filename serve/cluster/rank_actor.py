"""The actor of one rank, as it runs inside Ray: it starts, watches and ends the rank's process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from serve.cluster.rank_process import RankProcess, RankSpec
from serve.machine import free_port


@dataclass(frozen=True, slots=True)
class RankState:
    """What an actor reports.

    node: the id of its Ray node. generation: of the process; 0: it has started none. pid: 0 if
    there is none. status: the exit status of a process that has ended. group_url: where rank 0
    listens for ranks. http_url: where it serves, once it is ready. lines: its log since the last
    report.
    """

    node: str
    generation: int
    pid: int = 0
    status: int | None = None
    group_url: str = ""
    http_url: str = ""
    lines: tuple[str, ...] = ()


class RankActor:
    """Ray restarts it, without its process, when it or its node ends; the next `sync` starts the
    process again."""

    def __init__(self) -> None:
        self._generation = 0
        self._group_url = ""
        self._process: RankProcess | None = None

    def sync(self, spec: RankSpec | None) -> RankState:
        """Starts the process of a spec unless it runs or ran here, and reports. None: only reports.

        Raises OSError if the process cannot be started.
        """
        node, address = self._place()
        if spec is not None and spec.generation != self._generation:
            if self._process is not None:
                self._process.kill()
                self._process = None
            if spec.rank == 0 and urlsplit(spec.url).hostname != address:
                spec = replace(spec, url=_free_url(address))
            self._process = RankProcess(spec)
            self._generation, self._group_url = spec.generation, spec.url
        process = self._process
        if process is None:
            return RankState(node, 0)
        status = process.status()
        return RankState(
            node,
            self._generation,
            process.pid,
            status,
            self._group_url,
            process.url if status is None else "",
            tuple(process.take_lines()),
        )

    def send_signal(self, number: int) -> None:
        """Sends the process a signal, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process now; returns when it is gone."""
        if self._process is not None:
            self._process.kill()

    def _place(self) -> tuple[str, str]:
        """Returns the id and the address of this actor's node."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _free_url(address: str) -> str:
    port = free_port(address)
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
