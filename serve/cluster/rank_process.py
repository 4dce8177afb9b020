"""One rank of a model as a child process, `serve run`, that ends with the process that started it.

Run as a program, this module prepares the child and becomes `serve run`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_LINES = 1000  # that wait to be fetched
_MAX_CHARS = 2000  # of a line
_READY = " is ready at "
_PR_SET_PDEATHSIG = 1
_KEY = "MERGESTEP_GROUP_KEY_FILE"
# what a rank is told by other launchers, and what Ray sets for its own workers
_NOT_INHERITED = ("MERGESTEP_", "LWS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is to run.

    generation: counts the starts that the supervisor asks for; a rank that runs another one, or
    none, is started. url: where rank 0 listens for ranks; "": rank 0 is to choose. settings: those
    of `serve run` as TOML. secrets: variables of the environment. cwd: the folder to start in,
    where a machine has it.
    """

    generation: int
    rank: int
    size: int
    url: str
    settings: str = field(repr=False)
    key: str = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    cwd: str = ""


class RankProcess:
    """A running or ended rank."""

    def __init__(self, spec: RankSpec) -> None:
        """Starts the process. OSError if that fails.

        Call it in the main thread: the child ends with the thread that started it.
        """
        self.url = ""
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        with contextlib.ExitStack() as undo:
            # memory files have no name in any folder, and are gone with the last process
            files = [memory_file(text) for text in (spec.settings, spec.key)]
            for fd in files:
                undo.callback(os.close, fd)
            settings, key = (f"/proc/self/fd/{fd}" for fd in files)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve.cluster.rank_process", str(os.getpid()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, spec, key),
                cwd=spec.cwd if os.path.isdir(spec.cwd) else None,
                pass_fds=files,
            )
        self._reader = threading.Thread(target=self._read, name="mergestep-rank-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """Returns the exit status, negative for the number of a signal; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(1.0)  # its last lines
        return status

    def take_lines(self) -> list[str]:
        """Returns the lines of its log since the last call."""
        lines = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        return lines

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)  # does nothing if it has ended

    def kill(self) -> None:
        """Ends the process now and waits for it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(_MAX_CHARS):
                text = line.decode("utf-8", "replace").rstrip()
                if url := ready_url(text):
                    self.url = url
                elif text:
                    self._lines.append(text)


def ready_url(line: str) -> str:
    """Returns the address in the line that `serve run --quiet` prints when it is ready, or ""."""
    name, found, url = line.partition(_READY)
    is_address = found and name and url.startswith("http") and url.endswith("/v1")
    return url.removesuffix("/v1") if is_address else ""


def memory_file(text: str) -> int:
    """Returns the descriptor of a file in memory that only this user can read."""
    fd = os.memfd_create("mergestep-rank", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode())
    except BaseException:
        os.close(fd)
        raise
    return fd


def _environment(inherited: Mapping[str, str], spec: RankSpec, key_file: str) -> dict[str, str]:
    """Returns the machine's own environment with the rank's place in it."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    place = {"RANK": str(spec.rank), "WORLD_SIZE": str(spec.size), _KEY: key_file}
    if spec.url:
        place["MERGESTEP_GROUP_URL"] = spec.url
    return kept | place | dict(spec.secrets)


def _become_rank(parent: int, settings: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise SystemExit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise SystemExit("the actor has ended")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in its workers
    os.execv(sys.executable, [sys.executable, "-m", "serve", "run", "--config", settings])


if __name__ == "__main__":
    _become_rank(int(sys.argv[1]), sys.argv[2])
