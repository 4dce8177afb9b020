"""Network namespaces for benchmarks of faults: each has one link to this process's namespace, which
can be cut, slowed and restored."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

_WRONG_MAC = "02:00:00:00:00:01"


def can_have_namespaces() -> str | None:
    """Returns the reason why network namespaces cannot be made here, or None if they can."""
    if os.geteuid():
        return "only root can make network namespaces"
    probe = f"msprobe{os.getpid()}"
    try:
        done = _run(["ip", "netns", "add", probe], check=False)
        if done.returncode:
            return done.stderr.strip() or "no network namespaces"
        done = _run(["ip", "link", "add", "msp0", "type", "veth", "peer", "name", "msp1"], False)
        _run(["ip", "link", "del", "msp0"], check=False)
        _run(["ip", "netns", "del", probe], check=False)
    except OSError as error:
        return f"ip: {error}"
    return done.stderr.strip() or "no veth" if done.returncode else None


def _run(command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), check=check, capture_output=True, text=True)


class Site:
    """A network namespace with one link to this one."""

    def __init__(self, number: int) -> None:
        self.space = f"msf{os.getpid()}n{number}"
        self.link = f"ms{os.getpid() % 100_000}v{number}"
        subnet = f"10.{77 + os.getpid() % 100}.{number}"
        self.here, self.address = f"{subnet}.1", f"{subnet}.2"
        far = f"{self.link}p"
        _run(["ip", "netns", "add", self.space])
        _run(["ip", "link", "add", self.link, "type", "veth", "peer", "name", far])
        _run(["ip", "link", "set", far, "netns", self.space, "name", "eth0"])
        _run(["ip", "addr", "add", f"{self.here}/24", "dev", self.link])
        _run(["ip", "link", "set", self.link, "up"])
        self._inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._inside("ip", "link", "set", "eth0", "up")
        self._inside("ip", "link", "set", "lo", "up")

    def _inside(self, *command: str, check: bool = True) -> None:
        _run(["ip", "netns", "exec", self.space, *command], check)

    def cut(self, to_site: bool, from_site: bool) -> None:
        """Cuts one or both directions: frames are sent to an address that no host has."""
        wrong = ["lladdr", _WRONG_MAC, "nud", "permanent", "dev"]
        if to_site:
            _run(["ip", "neigh", "replace", self.address, *wrong, self.link])
        if from_site:
            self._inside("ip", "neigh", "replace", self.here, *wrong, "eth0")

    def down(self) -> None:
        _run(["ip", "link", "set", self.link, "down"])

    def slow(self, rate: str) -> None:
        shape = ["root", "tbf", "rate", rate, "burst", "16kbit", "latency", "400ms"]
        _run(["tc", "qdisc", "replace", "dev", self.link, *shape])
        self._inside("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def heal(self) -> None:
        _run(["ip", "link", "set", self.link, "up"])
        _run(["tc", "qdisc", "del", "dev", self.link, "root"], check=False)
        self._inside("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        _run(["ip", "neigh", "del", self.address, "dev", self.link], check=False)
        self._inside("ip", "neigh", "del", self.here, "dev", "eth0", check=False)

    def processes(self) -> list[int]:
        """Returns the ids of the processes in the namespace."""
        return [int(each) for each in _run(["ip", "netns", "pids", self.space]).stdout.split()]

    def close(self) -> None:
        _run(["ip", "link", "del", self.link], check=False)
        _run(["ip", "netns", "del", self.space], check=False)
