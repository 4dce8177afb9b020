"""Starts from a peer's memory, from packed weights on the disk and from the checkpoint.

`python -m bench.cluster.fast_start --model random:llama-1b` runs a replica that serves its weights
and measures, in rounds that take turns, what `--parts` names.

link: what the link carries, how fast the weights come over it into new memory and, over shm, how
fast the replica's own memory is ready for use, and what a stream of the replica loses meanwhile.
starts: fresh processes of `serve run` to their first token from each source. loads: the same from
the checkpoint, of a replica that gives its weights to others over shm, over tcp, or not at all.
zero: the first token of a request whose model has no process, behind the front of several models.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np

from bench.cluster.models import ask, served, until_ready
from bench.common.checkpoints import model_directory
from bench.kernels.transport import CONFIRM, DISCARD, answering, receive
from bench.offline.startup import drop_from_memory, start_once
from serve.cli.config_file import parse_size
from serve.config import EngineConfig
from serve.machine import free_port
from serve.models.packed_cache.layout import DATA_START, Index, Span, read_index
from serve.models.packed_cache.region import huge_pages
from serve.weight_peers.link import WeightLink
from serve.weight_peers.pull import Pull
from serve.weight_peers.same_memory import use_shared
from serve.weight_peers.wire import Area
from transport.base import Segment

_PART = 1 << 20
_LIMIT_S = 600.0
PARTS = ("link", "starts", "loads", "zero")
_NO_WEIGHTS = (".safetensors", ".index.json")
Readings = dict[str, list[float]]


def without_weights(model: Path, folder: Path) -> Path:
    """Returns a copy of a model's directory without its weights."""
    bare = folder / "bare" / model.name
    bare.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith(_NO_WEIGHTS):
            shutil.copy(file, bare)
    return bare


# -- the link


def link_rate(scheme: str, num_bytes: int, folder: Path) -> float:
    """Returns the bytes a second of as many bytes from memory to a process that drops them."""
    url = f"shm://{folder}/link" if scheme == "shm" else "tcp://127.0.0.1:0"
    data = np.full(num_bytes, DISCARD, np.uint8)
    last = np.full(64, CONFIRM, np.uint8)
    with answering(url, "off") as endpoint:
        began_s = time.perf_counter()
        for at in range(0, num_bytes, _PART):
            length = min(_PART, num_bytes - at)
            endpoint.post([Segment(data.ctypes.data + at, 1, length, length)], 60.0)
        endpoint.post([Segment(last.ctypes.data, 1, 64, 64)], 60.0)
        receive(endpoint)
        return num_bytes / (time.perf_counter() - began_s)


def memory_rate(num_bytes: int) -> float:
    """Returns the bytes a second at which the system makes new memory."""
    began_s = time.perf_counter()
    huge_pages(num_bytes).fill_(0)
    return num_bytes / (time.perf_counter() - began_s)


def read_remote_index(url: str, key: bytes) -> Index:
    link = WeightLink(url, key)
    link.connect()
    found = link.describe(object)
    content = link.fetch(Area.INDEX, found.index_place)
    link.close()
    digest = bytes.fromhex(found.index_place[1])
    return read_index(content, digest, Span(found.data_end, len(content)))


def pull_rate(url: str, key: bytes, index: Index) -> float:
    link, pull = WeightLink(url, key), Pull(index)
    link.connect()
    began_s = time.perf_counter()
    pull.run([link], object)
    return pull.num_bytes / (time.perf_counter() - began_s)


def shared_rate(url: str, key: bytes, index: Index) -> float:
    """Returns the bytes a second from a new connection to memory of the peer that was compared."""
    link = WeightLink(url, key)
    began_s = time.perf_counter()
    link.connect()
    fd = link.take_shared()
    if fd is None:
        raise SystemExit("the replica does not share its memory on this system")
    used = use_shared(fd, index, object)
    seconds = time.perf_counter() - began_s
    assert len(used.data) >= index.data_end
    link.close()
    return (index.data_end - DATA_START) / seconds


# -- a stream of the replica


class Stream:
    """Reads one endless answer after the other and notes when tokens come."""

    def __init__(self, port: int) -> None:
        self.at_s: list[float] = []
        self._port, self._is_over = port, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()

    def gaps_ms(self, windows: list[tuple[float, float]]) -> list[float]:
        """Returns the gaps between tokens that end within one of the windows."""
        gaps = zip(self.at_s, self.at_s[1:], strict=False)
        return [1e3 * (end - begin) for begin, end in gaps if any(a < end < b for a, b in windows)]

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
        connection.request("GET", "/v1/models")
        name = json.loads(connection.getresponse().read())["data"][0]["id"]
        body = {
            "model": name,
            "prompt": [5, 6, 7],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        while not self._is_over:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            while (line := response.readline()) and not self._is_over:
                if line.startswith(b"data: {"):
                    self.at_s.append(time.perf_counter())
            if not self._is_over:
                response.read()
        connection.close()


def measure_link(given: argparse.Namespace, folder: Path, peer: Peer) -> None:
    index = read_remote_index(peer.url, peer.key)
    num_bytes = index.data_end
    rows: Readings = defaultdict(list)
    ways = {"copied": pull_rate}
    if given.scheme == "shm":
        ways["shared"] = shared_rate
    for _ in range(given.rounds):
        rows["link"].append(link_rate(given.scheme, num_bytes, folder) / 1e9)
        rows["new memory"].append(memory_rate(num_bytes) / 1e9)
        for way, rate in ways.items():
            rows[way].append(rate(peer.url, peer.key, index) / 1e9)
            rows[f"{way} / link"].append(rows[way][-1] / rows["link"][-1])
    print(f"{num_bytes / 1e9:.2f} GB over {given.scheme}, GB/s: median (lowest to highest)")
    for name, values in rows.items():
        print(f"  {name:20} {_spread(values)}")
    stream = Stream(peer.port)
    windows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    time.sleep(2.0)
    for _ in range(given.rounds):
        began_s = time.perf_counter()
        time.sleep(2.0)
        windows["alone"].append((began_s, time.perf_counter()))
        for way, rate in ways.items():
            began_s = time.perf_counter()
            rows[f"{way} beside a stream"].append(rate(peer.url, peer.key, index) / 1e9)
            windows[f"while weights are {way}"].append((began_s, time.perf_counter()))
    stream.close()
    for way in ways:
        name = f"{way} beside a stream"
        print(f"  {name:20} {_spread(rows[name])}")
    for name, times in windows.items():
        gaps = stream.gaps_ms(times)
        if gaps:
            p50, most = statistics.median(gaps), max(gaps)
            print(f"  tokens of a stream, {name}: ms p50 {p50:.1f}, most {most:.1f} ({len(gaps)})")


# -- starts


class Peer:
    """A replica that serves its weights. url: of the weights."""

    def __init__(self, port: int, url: str, key: bytes, key_file: Path) -> None:
        self.port, self.url, self.key, self.key_file = port, url, key, key_file
        self.options = ["--weights-from", url, "--weights-key-file", str(key_file)]


@contextmanager
def serving_peer(given: argparse.Namespace, model: str | None, folder: Path) -> Iterator[Peer]:
    key_file = folder / "key"
    key_file.write_text("a key for a measurement")
    key_file.chmod(0o600)
    url = f"shm://{folder}/weights"
    if given.scheme == "tcp":
        url = f"tcp://127.0.0.1:{free_port()}"
    options = ["--weights-listen", url, "--weights-key-file", str(key_file), *given.options]
    options += ["--packed-cache", "off"]  # no file that it maps stays cached
    with served([*([model] if model else []), *options]) as (_, address):
        asyncio.run(_wait(address))
        port = int(address.rpartition(":")[2])
        yield Peer(port, url, key_file.read_bytes(), key_file)


async def _wait(address: str) -> None:
    async with aiohttp.ClientSession(address) as session:
        await until_ready(session)


def nothing_kept(bare: Path) -> list[str]:
    """Returns options with which no packed weights are kept, but the trial of the tokenizer is."""
    return ["--packed-cache", str(bare.parent / "kept"), "--packed-cache-bytes", "1"]


def measure_starts(
    given: argparse.Namespace, model: Path, name: str | None, bare: Path, peer: Peer
) -> None:
    rows: Readings = defaultdict(list)

    def start(row: str, model_of: str | None, options: list[str]) -> None:
        found = start_once(model_of, [*options, *given.options], limit_s=_LIMIT_S)
        first = found.at_s["first token"]
        rows[row].append(first)
        rows[f"{row}, from listening"].append(first - found.at_s["listening"])

    off = nothing_kept(bare)
    start_once(name, given.options, limit_s=_LIMIT_S, lets_write=True)  # packs once
    start_once(str(bare), [*given.options, *off, *peer.options], limit_s=_LIMIT_S)
    for _ in range(given.rounds):
        start("a peer's memory", str(bare), [*off, *peer.options])
        start("packed weights, in memory", name, [])
        drop_from_memory(model)
        start("packed weights, on the disk", name, [])
        start("the checkpoint, in memory", name, off)
        drop_from_memory(model)
        start("the checkpoint, on the disk", name, off)
    print("seconds from the command to the first token: median (lowest to highest)")
    for row, values in rows.items():
        print(f"  {row:44} {_spread(values)}")


def measure_loads(
    given: argparse.Namespace, name: str | None, bare: Path, folder: Path, key_file: Path
) -> None:
    listeners = {
        "shm": ["--weights-listen", f"shm://{folder}/loads"],
        "tcp": ["--weights-listen", f"tcp://127.0.0.1:{free_port()}"],
    }
    rows: Readings = defaultdict(list)
    for _ in range(given.rounds):
        for row in (*listeners, "none"):
            options = [*given.options, *nothing_kept(bare)]
            if row in listeners:
                options += [*listeners[row], "--weights-key-file", str(key_file)]
            found = start_once(name, options, limit_s=_LIMIT_S)
            rows[row].append(found.at_s["first token"] - found.at_s["listening"])
    print("seconds from listening to the first token, by who may have the weights:")
    for row, values in rows.items():
        print(f"  {row:20} {_spread(values)}")


def measure_from_zero(
    given: argparse.Namespace, model: Path, name: str | None, bare: Path, peer: Peer
) -> None:
    """The front of two models, of which the first has no process when it is asked for."""
    default, off = str(EngineConfig().model_path), nothing_kept(bare)
    kinds: dict[str, tuple[str, list[str], bool]] = {
        "packed weights, in memory": (name or default, [], False),
        "packed weights, on the disk": (name or default, [], True),
        "the checkpoint, in memory": (name or default, off, False),
        "a peer's memory": (str(bare), [*off, *peer.options], False),
    }
    rows: Readings = defaultdict(list)

    async def once(address: str) -> float:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(address, timeout=timeout) as session:
            await until_ready(session)
            answer = await ask(session, model.name, "Tell me a joke", 4)
            assert answer.ttft_s is not None, answer.failure
            return answer.ttft_s

    start_once(name, given.options, limit_s=_LIMIT_S, lets_write=True)
    start_once(str(bare), [*given.options, *off, *peer.options], limit_s=_LIMIT_S)
    with tempfile.TemporaryDirectory() as other:
        second = Path(shutil.copytree(default, Path(other) / "second"))
        for _ in range(given.rounds):
            for row, (path, options, is_cold) in kinds.items():
                if is_cold:
                    drop_from_memory(model)
                models = [path, str(second), "--memory-budget", str(given.memory_budget)]
                with served([*models, *options, *given.options]) as (_, address):
                    rows[row].append(asyncio.run(once(address)))
    print("seconds from a request to its first token when no process has its model:")
    for row, values in rows.items():
        print(f"  {row:44} {_spread(values)}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory or random:SHAPE; default: the embedded one")
    parser.add_argument("--scheme", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--memory-budget", type=parse_size, default=6 << 30)
    parser.add_argument("--kv-cache-bytes", type=parse_size, default=256 << 20)
    given = parser.parse_args()
    given.options = ["--kv-cache-bytes", str(given.kv_cache_bytes)]
    found = model_directory(given.model)
    model = Path(found) if found is not None else EngineConfig().model_path
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        bare = without_weights(model, folder)
        with serving_peer(given, found, folder) as peer:
            if "link" in given.parts:
                measure_link(given, folder, peer)
            if "starts" in given.parts:
                measure_starts(given, model, found, bare, peer)
            if "loads" in given.parts:
                measure_loads(given, found, bare, folder, peer.key_file)
            if "zero" in given.parts:
                measure_from_zero(given, model, found, bare, peer)


if __name__ == "__main__":
    main()
