"""The limit of open files, which bounds connections: each of them is a file."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

from serve.errors import ConfigError
from serve.http.edge import limits

logger = logging.getLogger(__name__)

SPARE = 16  # connections above the limit that still get an answer
_FOR_OTHERS = 32  # files beside connections: checkpoints, K/V on disk, worker processes
_USUAL = 65_536


def raise_file_limit(max_connections: int) -> None:
    """Raises the soft limit, usually 1024. Raises ConfigError if the hard limit is too low for any
    connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _files_for(max_connections)
    wanted = max(_USUAL, needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if _limit() < _files_for(1):
        raise ConfigError(
            f"the limit of open files (ulimit -n) is {_limit()}; the server needs {_files_for(1)}"
            f" at least, and {needed} for max_connections {max_connections}: run `ulimit -n"
            f" {needed}` before it, or set LimitNOFILE={needed} in its systemd unit"
        )


def allowed_connections(max_connections: int) -> int:
    """Returns how many connections there may be. Logs a warning if the limit of open files lowers
    what a setting asks for, or leaves very few."""
    allowed = max(1, min(max_connections, _limit() - _files_for(0)))
    is_few = allowed < limits.CONNECTIONS_PER_ADDRESS
    if allowed < max_connections and (is_few or max_connections != limits.CONNECTIONS):
        needed = _files_for(max_connections)
        logger.warning(
            "max_connections is %d in place of %d: the limit of open files is %d, and %d are"
            " needed; `ulimit -n %d` in the shell, or LimitNOFILE=%d in a systemd unit, raises it",
            *(allowed, max_connections, _limit(), needed, needed, needed),
        )
    return allowed


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def _files_for(num_connections: int) -> int:
    """Returns how many files are open with these connections and the rest of the server."""
    try:
        num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        num_open = 64
    return num_open + _FOR_OTHERS + SPARE + num_connections
