"""llama.cpp over weights that are mapped, and that are dropped from memory before a pass.

With less memory than weights, the system drops those pages first that were used least recently,
which a pass over all layers in turn needs next: each pass reads nearly everything again. Without
the right to set such a limit, the same is had by dropping the pages before every pass
(process_madvise with MADV_PAGEOUT). A limit could at best keep its share of the pages.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_READY_S = 300.0
_PROCESS_MADVISE, _PAGEOUT = 440, 21
_LEFT = 0.02  # of the pages that may be left in memory


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class MappedServer:
    """A llama-server with mapped weights, as they are in the file."""

    def __init__(self, program: str, gguf: Path, threads: int, requests: int) -> None:
        self._gguf = gguf
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [program, "-m", str(gguf), "--port", str(self._port), "-np", str(requests)]
        command += ["-c", str(512 * requests), "-t", str(threads), "--no-webui", "--no-repack"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        due = time.monotonic() + _READY_S
        while not self._is_ready():
            if time.monotonic() > due or self._process.poll() is not None:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def cold_pass_s(self, requests: int) -> float:
        """Returns the seconds of one token of so many requests at once, from weights on the disk.
        OSError if the weights cannot be dropped."""
        self._drop()
        began = time.perf_counter()
        with ThreadPoolExecutor(requests) as threads:
            list(threads.map(self._token, range(requests)))
        return time.perf_counter() - began

    def _token(self, number: int) -> bytes:
        body = {"prompt": [5 + number], "n_predict": 1, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        found: bytes = urllib.request.urlopen(request).read()
        return found

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=1).read()
        except OSError:
            return False
        return True

    def _drop(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in range(5):
            pidfd = os.pidfd_open(self._process.pid)
            for start, end in self._mappings():
                part = _Iovec(start, end - start)
                done = libc.syscall(_PROCESS_MADVISE, pidfd, ctypes.byref(part), 1, _PAGEOUT, 0)
                if done < 0:
                    raise OSError(ctypes.get_errno(), "process_madvise")
            os.close(pidfd)
            fd = os.open(self._gguf, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            if self._resident_bytes() <= _LEFT * self._gguf.stat().st_size:
                return
        raise OSError("the weights stay in memory")

    def _mappings(self) -> list[tuple[int, int]]:
        found = []
        for line in Path(f"/proc/{self._process.pid}/maps").read_text().splitlines():
            if line.endswith(str(self._gguf)):
                start, _, end = line.split()[0].partition("-")
                found.append((int(start, 16), int(end, 16)))
        return found

    def _resident_bytes(self) -> int:
        total, is_ours = 0, False
        for line in Path(f"/proc/{self._process.pid}/smaps").read_text().splitlines():
            if "-" in line.split()[0] and not line.startswith(("VmFlags", "Kernel")):
                is_ours = line.endswith(str(self._gguf))
            elif is_ours and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
        return total
