"""Starts workers as processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.group.links.worker_link import WorkerLink
from serve.machine import usable_processors
from transport import listen
from transport.base import Listener, TransportError

logger = logging.getLogger(__name__)

_CONNECT_S = 60.0  # for a process to start, import and connect
# A process that has used no processor time for this long, while it starts, is given up. One that
# is stopped is given up at once, as a worker that answers no heartbeat.
_IDLE_START_S, _STOPPED_START_S = 8.0, 1.0
_WINDOW_BYTES = 1 << 20  # for the small messages of a worker
# A worker that has missed two heartbeats may be lost: a process is started for its place before
# that is certain, since importing takes longer than the rest of a loss.
_SUSPECT_S = 0.5
_YOUNG_S = 10.0  # for an engine to hold the folder that it has just made
_UNUSED_S = 30.0  # after which a process that was not needed is ended
FOLDER_PREFIX = "mergestep-group-"
"""How the names of folders with an engine's sockets begin."""


class Asked(NamedTuple):
    """What a worker reads from its standard input: where the engine is, its process, and the
    worker's rank."""

    url: str
    key: str
    rank: int
    log_level: str
    engine_pid: int


class LocalWorkers:
    """Starts workers on this machine. They end when their connection or standard input closes."""

    def __init__(self) -> None:
        """ConfigError if sockets cannot be made in the temporary directory."""
        remove_left_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        self._held = _lock_folder(self._folder.name)
        self._num_urls = 0
        self.key = secrets.token_bytes(32)
        url = f"shm://{Path(self._folder.name) / 'engine'}"
        try:
            self._listener: Listener = listen(url, key=self.key, window_bytes=_WINDOW_BYTES)
        except (TransportError, OSError, ValueError) as error:
            os.close(self._held)
            self._folder.cleanup()
            raise ConfigError(
                f"TMPDIR: {tempfile.gettempdir()} has no room for a socket: {error}"
            ) from error
        self._lock = threading.Lock()  # guards the spare process
        self._spare: subprocess.Popen[bytes] | None = None
        self._spared_s = 0.0  # when it was started

    def start(self, ranks: Iterable[int], check: Callable[[], object] = object) -> list[WorkerLink]:
        """Starts workers and returns their connections. check: called while waiting; may raise.
        MergestepError if one does not come up."""
        processes: dict[int, subprocess.Popen[bytes]] = {}
        links: list[WorkerLink] = []
        end_s = time.monotonic() + _CONNECT_S
        starts: dict[int, _Start] = {}
        try:
            for rank in ranks:
                processes[rank] = self._take_spare() or self._spawn()
                starts[rank] = _Start(processes[rank].pid)
                self._tell(processes[rank], rank)
            while len(links) < len(processes):
                check()
                endpoint = self._listener.accept(0.1)
                if endpoint is not None:
                    peer = endpoint.peer.info.get("rank")
                    if not isinstance(peer, int) or peer not in processes:
                        endpoint.close()
                        continue
                    links.append(WorkerLink(peer, endpoint, processes[peer]))
                    starts.pop(peer, None)
                for rank, process in processes.items():
                    if process.poll() is not None:
                        raise MergestepError(
                            f"the worker of rank {rank} ended with status {process.returncode}"
                        )
                    if rank in starts and starts[rank].is_stuck():
                        raise MergestepError(f"the worker of rank {rank} is stuck while it starts")
                if time.monotonic() > end_s:
                    raise MergestepError(f"no worker connected within {_CONNECT_S:.0f} s")
        except BaseException:
            for link in links:
                link.close()
            for process in processes.values():
                process.kill()
                process.communicate()  # closes its standard input
            raise
        return sorted(links, key=lambda link: link.rank)

    def stage_url(self, rank: int) -> str:
        """Returns where a rank listens for the next stage."""
        self._num_urls += 1
        return f"shm://{Path(self._folder.name) / f'rank-{rank}-{self._num_urls}'}"

    def note_silence(self, silence_s: float) -> None:
        """Notes how long workers have been silent at most, and has a process ready for one that
        may be lost. Any thread may call it."""
        with self._lock:
            now_s, spare = time.monotonic(), self._spare
            if silence_s >= _SUSPECT_S and spare is None:
                try:
                    self._spare, self._spared_s = self._spawn(), now_s
                except OSError as error:  # tried again when it is needed for certain
                    logger.warning("no process can be started: %s", error)
            elif (
                silence_s < _SUSPECT_S and spare is not None and now_s > self._spared_s + _UNUSED_S
            ):
                self._end_spare()

    def _take_spare(self) -> subprocess.Popen[bytes] | None:
        """Returns the process that waits to be told its rank, if there is one."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None or spare.poll() is None:
            return spare
        spare.communicate()  # closes its standard input
        return None

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare.communicate()  # closes its standard input
            self._spare = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "serve.group.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def _tell(self, process: subprocess.Popen[bytes], rank: int) -> None:
        """Tells a process what it reads first. It may have ended already, which is seen later."""
        assert process.stdin is not None
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        asked = Asked(self._listener.url, self.key.hex(), rank, level, os.getpid())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked._asdict()).encode() + b"\n")
            process.stdin.flush()

    def close(self) -> None:
        with self._lock:
            self._end_spare()
        self._listener.close()
        self._folder.cleanup()
        os.close(self._held)


class _Start:
    """A process that starts: whether it gets on."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._ticks = -1
        self._since_s = time.monotonic()  # when it used processor time last, or was seen to run

    def is_stuck(self) -> bool:
        """Returns whether the process has been stopped, or has slept without any processor time,
        for too long. One that waits for a disk gets on."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, which the caller sees
            return False
        state, ticks = fields[0], int(fields[11]) + int(fields[12])  # proc(5): utime, stime
        now_s = time.monotonic()
        is_stopped = state in "tT"
        if (ticks != self._ticks or state in "RD") and not is_stopped:
            self._ticks, self._since_s = ticks, now_s
        return now_s - self._since_s > (_STOPPED_START_S if is_stopped else _IDLE_START_S)


def _lock_folder(folder: str | Path) -> int:
    """Returns a descriptor that holds an engine's folder. BlockingIOError if an engine has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_left_folders() -> None:
    """Removes this user's folders whose engines were killed together with all workers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another's, in use, or removed meanwhile
            found = folder.lstat()
            is_young = time.time() - found.st_mtime < _YOUNG_S  # its engine may not hold it yet
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or is_young:
                continue
            descriptor = _lock_folder(folder)
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def threads_of_a_rank(config: EngineConfig, size: int) -> int:
    """Returns the threads of each of `size` ranks on this host."""
    processors = min(config.compute_threads or usable_processors(), usable_processors())
    return max(1, processors // size)


def cpus_of_ranks(size: int) -> list[list[int]]:
    """Returns the cores of each rank, so that ranks do not take turns on one; empty where there
    are fewer cores than ranks."""
    cpus = sorted(os.sched_getaffinity(0))
    count = len(cpus) // size
    return [cpus[rank * count : (rank + 1) * count] if count else [] for rank in range(size)]
