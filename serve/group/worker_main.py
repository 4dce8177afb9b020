"""The process of a worker: `python -m serve.group.worker_main` where the engine has started it, and
`run_rank` where others have.

The former reads a line of JSON from its standard input, which is open as long as the engine lives.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from serve.config import EngineConfig
from serve.errors import MergestepError
from serve.group.kept_rank import KeptRank
from serve.group.launch import FOLDER_PREFIX, Asked, cpus_of_ranks, threads_of_a_rank
from serve.group.links.worker_link import ORDERLY_END
from serve.group.membership import Membership, read_group_key
from serve.group.remote_workers import CONNECT_S
from serve.group.worker import Worker
from transport import connect
from transport.base import Endpoint, TransportError

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 16 << 20  # for step messages
_RETRY_S = 0.5  # between two attempts to reach the engine
# An attempt's time grows: TCP repeats a lost first packet after 1 and 3 s, and a new attempt, which
# is sooner, finds a link that has just been restored.
_ATTEMPT_S, _MORE_S, _MAX_ATTEMPT_S = 1.5, 0.1, 5.0
_LOG_EVERY_S = 10.0
_DRAIN_S = 60  # for the engine to end after a signal
_ENGINE_END_S, _LOOK_S = 5.0, 0.02
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main() -> None:
    # A terminal's Ctrl-C, and the SIGTERM that systemd sends to all processes of a service, are for
    # the engine, which answers its requests first and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asked = Asked(**json.loads(_first_line()))
    # A stopped worker must go on to see that the engine has ended. (The system also sends this when
    # only the thread that has started this process ends, which changes nothing.)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    logging.basicConfig(
        level=asked.log_level,
        format=f"%(asctime)s %(levelname)-7s rank {asked.rank} %(name)s: %(message)s",
    )
    ending = (asked.engine_pid, asked.url)
    end = threading.Thread(
        target=_end_with_engine, args=ending, name="mergestep-stdin", daemon=True
    )
    end.start()
    key = bytes.fromhex(asked.key)
    info = {"rank": asked.rank}
    try:
        engine = connect(asked.url, key=key, info=info, window_bytes=_WINDOW_BYTES)
    except (TransportError, OSError):
        if os.getppid() == asked.engine_pid:
            raise
    else:
        Worker(engine, key, {}).serve()
    end.join()  # it ends the process


def run_rank(config: EngineConfig, member: Membership) -> None:
    """Serves the engine of a group, rank 0, as another rank of it, until the engine ends.

    An engine that is lost is waited for, with the weights. ConfigError names a wrong setting;
    MergestepError if no engine is there for ten minutes.
    """
    key = read_group_key(config, member)
    threads = threads_of_a_rank(config, member.local_size)
    cpus = cpus_of_ranks(member.local_size)[member.local_rank]
    if member.local_size > 1 and cpus:
        os.sched_setaffinity(0, cpus)
    settings = {"model": str(config.model_path), "compute_threads": threads}
    signals, kept = _Signals(), KeptRank()
    while True:
        worker = Worker(_connected(member, key), key, settings, member.local_rank, kept)
        logger.info("rank %d of %d is connected to %s", member.rank, member.size, member.url)
        signals.has_engine = True
        worker.serve()
        signals.has_engine = False
        if worker.has_ended or signals.has_come:
            return
        time.sleep(_RETRY_S)


class _Signals:
    """Lets a rank outlive a signal while an engine uses it. torchrun and Kubernetes send it to the
    engine as well, which ends its requests and then its ranks."""

    def __init__(self) -> None:
        self.has_engine = False
        self.has_come = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.has_come or not self.has_engine:
            raise SystemExit(128 + number)
        self.has_come = True
        signal.alarm(_DRAIN_S)  # whose signal ends the process
        logger.info("this rank ends with the engine; a second signal ends it at once")


def _connected(member: Membership, key: bytes) -> Endpoint:
    """Waits for the engine."""
    began_s = time.monotonic()
    logged_s = began_s + 1.0 - _LOG_EVERY_S
    for number in itertools.count():
        try:
            info = {"rank": member.rank, "size": member.size, "listen": member.own_url}
            return connect(
                member.url,
                key=key,
                info=info,
                window_bytes=_WINDOW_BYTES,
                timeout_s=min(_ATTEMPT_S + number * _MORE_S, _MAX_ATTEMPT_S),
            )
        except (TransportError, OSError) as error:
            now_s, reason = time.monotonic(), str(error)
        if now_s > began_s + CONNECT_S:
            raise MergestepError(f"rank {member.rank}: no engine for {CONNECT_S:.0f} s: {reason}")
        if now_s > logged_s + _LOG_EVERY_S:
            logged_s = now_s
            logger.info("rank %d waits for the engine: %s", member.rank, reason)
        time.sleep(_RETRY_S)
    raise AssertionError("endless")


def _end_with_engine(engine_pid: int, url: str) -> None:
    """Ends this process when the engine's end of the pipe closes, however the engine ended. Removes
    what a killed engine has left: the folder of its sockets."""
    is_orderly = False
    while byte := os.read(0, 1):
        is_orderly = byte == ORDERLY_END
    folder = Path(url.removeprefix("shm://")).parent
    if not is_orderly and folder.name.startswith(FOLDER_PREFIX):
        end_s = time.monotonic() + _ENGINE_END_S
        # a process that was killed closes its files before it counts as ended
        while os.getppid() == engine_pid and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        while os.getppid() != engine_pid and folder.exists() and time.monotonic() < end_s:
            shutil.rmtree(folder, ignore_errors=True)  # other workers remove the same files
    os._exit(0)


def _first_line() -> bytes:
    """Reads standard input up to the first line's end, without a buffer that a thread would hold
    when the interpreter ends."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            raise SystemExit("the engine ended")
        line += part
    return line


if __name__ == "__main__":
    main()
