"""Memory nodes in threads of the test's process, behind listeners of any transport."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import transport
from memory.nodes.server.node import MemoryNode
from ops import get_backend
from serve.loading.node_key import LOCAL_KEY

KEY = b"a key that only tests know, 64 bits and more"
MIB = 1 << 20


@contextmanager
def nodes(scheme, count, folder, capacity_bytes=16 * MIB, key=None, encryption="auto"):
    """Yields the nodes' addresses; checks afterwards that no memory is leased."""
    made = []
    for number in range(count):
        url = {
            "inproc": f"inproc://{folder.name}-{number}",
            "shm": f"shm://{folder}/{number}",
            "tcp": "tcp://127.0.0.1:0",
            "rdma": "rdma://127.77.0.1:0",
        }[scheme]
        node = MemoryNode(capacity_bytes, get_backend("cpu"))
        listener = transport.listen(
            url,
            key=key or (KEY if scheme in ("tcp", "rdma") else LOCAL_KEY),
            info={"capacity_bytes": capacity_bytes},
            window_bytes=16 * MIB,
            encryption=encryption,
        )
        thread = threading.Thread(target=node.serve, args=(listener,))
        thread.start()
        made.append((node, listener, thread))
    try:
        yield [listener.url for _, listener, _ in made]
        deadline = time.monotonic() + 10
        while any(n.stats().num_engines for n, _, _ in made) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [n.stats().bytes_leased for n, _, _ in made] == [0] * count
        assert [n.stats().num_offences for n, _, _ in made] == [0] * count
    finally:
        for node, listener, thread in made:
            listener.close()
            node.close()
            thread.join(10)


def key_file(folder, key=KEY):
    path = folder / "key"
    path.write_bytes(key + b"\n")
    path.chmod(0o600)
    return path
