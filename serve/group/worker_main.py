"""The process of a worker that the engine has started: `python -m serve.group.worker_main`.

It reads one line of JSON from its standard input, which stays open as long as the engine lives.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from serve.group.launch import FOLDER_PREFIX, Asked
from serve.group.worker import Worker
from transport import connect

_WINDOW_BYTES = 16 << 20  # for step messages
_NUM_LOOKS, _LOOK_S = 20, 0.02


def main() -> None:
    # A terminal's Ctrl-C, and the SIGTERM that systemd sends to all processes of a service, are for
    # the engine, which answers its requests first and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine_pid = os.getppid()
    asked = Asked(**json.loads(_first_line()))
    logging.basicConfig(
        level=asked.log_level,
        format=f"%(asctime)s %(levelname)-7s rank {asked.rank} %(name)s: %(message)s",
    )
    ending = (engine_pid, asked.url)
    threading.Thread(
        target=_end_with_engine, args=ending, name="mergestep-stdin", daemon=True
    ).start()
    key = bytes.fromhex(asked.key)
    info = {"rank": asked.rank}
    engine = connect(asked.url, key=key, info=info, window_bytes=_WINDOW_BYTES)
    Worker(engine, key, {}).serve()


def _end_with_engine(engine_pid: int, url: str) -> None:
    """Ends this process when the engine's end of the pipe closes, however the engine ended. Removes
    what a killed engine has left: the folder of its sockets."""
    while os.read(0, 1):
        pass
    folder = Path(url.removeprefix("shm://")).parent
    for _ in range(_NUM_LOOKS):  # its files are closed before it counts as ended
        if os.getppid() != engine_pid:
            if folder.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
            break
        time.sleep(_LOOK_S)
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
