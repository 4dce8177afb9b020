"""Engines over memory nodes: `serve bench nodes [WHAT ...]`.

WHAT is any of five measurements. equality: how many answers over two nodes have the tokens and the
bits of local K/V. capacity: the sequences that run at once with 256 MiB of K/V in
this machine, and with two nodes of 2,400 MiB each. speed: decoding over nodes and in this process,
with the same number of cores in all. overlap: the gain of early q and of two batches in flight
over a real node. layer: the time of a layer of 16 rows beside its kernels, by transport.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import random_checkpoint
from bench.common.node_processes import memory_nodes
from bench.nodes.equality import measure_equality
from bench.nodes.node_layer import measure_layers
from bench.nodes.overlap import measure_overlap
from serve import LLM, SamplingParams
from serve.errors import ConfigError
from serve.request import Prompt

_LOCAL_BYTES = 256 << 20

Result = tuple[Table, dict[str, Any]]


def nodes(
    what: Sequence[str] = (), *, json_file: Path | None = None, quick: bool = False
) -> dict[str, Any]:
    """Runs measurements, prints their tables and returns their results, which are also written to
    json_file. what: names of MEASUREMENTS; all of them by default. Raises ConfigError."""
    tables.check_file(json_file)
    if unknown := [name for name in what if name not in MEASUREMENTS]:
        raise ConfigError(
            f"what must be any of {', '.join(MEASUREMENTS)}, not {', '.join(unknown)}"
        )
    head, results, console = tables.Head.now("nodes"), {}, tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="mergestep-nodes-") as folder:
        for name in what or MEASUREMENTS:
            table, results[name] = MEASUREMENTS[name](Path(folder), quick)
            console.print(table)
    tables.write(json_file, head, results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(MEASUREMENTS))
    parser.add_argument("--quick", action="store_true", help="tiny models, as a smoke test")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes folders and processes
    try:
        print(json.dumps(nodes(args.what, quick=args.quick)))
    except ConfigError as error:
        parser.error(str(error))


class _Watch:
    """Polls an engine for the most sequences and K/V bytes at once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.most_running = 0
        self.most_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            stats = self._llm.stats()
            self.most_running = max(self.most_running, stats.num_running)
            used = stats.pages_in_use * stats.kv_page_bytes
            self.most_bytes = max(self.most_bytes, used)


def measure_capacity(folder: Path, is_quick: bool) -> Result:
    """Runs the same 56 requests of 1,024 + 320 tokens, 64 KiB a token in fp32, in this process and
    over two nodes."""
    shape, count, length, answer = ("tiny", 24, 200, 8) if is_quick else ("wide-kv", 56, 1024, 320)
    model = str(random_checkpoint(shape))
    local = 1 << 20 if is_quick else _LOCAL_BYTES
    capacity = "8M" if is_quick else "2400M"
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 1000) for _ in range(length)] for _ in range(count)]
    table = Table("K/V", "sequences at once", "K/V in use, MiB", "tokens/s", "seconds")
    table.title = f"{count} requests of {length} + {answer} tokens, {shape}, K/V fp32"
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": length + answer,
        "max_num_seqs": 64,
        "prefix_cache": False,
        "speculation": "off",
        "kv_cache_bytes": local,
    }
    rows = [_serve(model, prompts, answer, settings)]
    with memory_nodes(2, folder, capacity=capacity) as urls:
        rows.append(_serve(model, prompts, answer, settings | _over(urls, folder)))
    names = [f"{local >> 20} MiB here", f"two nodes of {capacity}"]
    for name, (watch, seconds, _) in zip(names, rows, strict=True):
        rate = count * answer / seconds
        used = f"{watch.most_bytes / 2**20:,.0f}"
        table.add_row(name, str(watch.most_running), used, f"{rate:.1f}", f"{seconds:.1f}")
    alone, nodes = rows
    times = nodes[0].most_running / alone[0].most_running
    is_same = alone[2] == nodes[2]
    table.caption = f"{times:.1f}x the batch; same tokens: {is_same}"
    found = {
        "times": times,
        "bytes": nodes[0].most_bytes,
        "is_same": is_same,
        "sequences": [watch.most_running for watch, _, _ in rows],
        "tokens_per_s": [count * answer / seconds for _, seconds, _ in rows],
    }
    return table, found


def _over(urls: list[str], folder: Path) -> dict[str, Any]:
    return {"memory_nodes": tuple(urls), "memory_node_key_file": folder / "key"}


def _serve(
    model: str, prompts: list[list[int]], answer: int, settings: dict[str, Any]
) -> tuple[_Watch, float, list[list[int]]]:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    with LLM(model, seed=0, **settings) as llm, _Watch(llm) as watch:
        began = time.perf_counter()
        asked: list[Prompt] = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    return watch, seconds, [list(o.outputs[0].token_ids) for o in outputs]


def measure_speed(folder: Path, is_quick: bool) -> Result:
    """Decodes 16 sequences in one process with two threads, and over one node with a thread in
    each process."""
    shape, length, answer = ("tiny", 64, 16) if is_quick else ("llama-1b", 512, 48)
    model = str(random_checkpoint(shape))
    rng = random.Random(2)
    prompts = [[rng.randrange(300, 1000) for _ in range(length)] for _ in range(16)]
    table = Table("", "time between tokens, ms", "of local")
    table.title = f"16 sequences, {length} tokens of context, {shape}"
    settings: dict[str, Any] = {"max_model_len": length + answer, "max_num_seqs": 16}
    found = {"local, two threads": _decode_ms(model, prompts, answer, settings)}
    one_thread = settings | {"compute_threads": 1}
    found["local, one thread"] = _decode_ms(model, prompts, answer, one_thread)
    for scheme in ("shm", "tcp"):
        with memory_nodes(1, folder, scheme=scheme) as urls:
            remote = one_thread | _over(urls, folder)
            name = f"one node over {scheme}, a thread each"
            found[name] = _decode_ms(model, prompts, answer, remote)
    for name, ms in found.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / found['local, two threads']:.2f}")
    return table, found


def _decode_ms(
    model: str, prompts: list[list[int]], answer: int, settings: dict[str, Any]
) -> float:
    """Returns the mean milliseconds of a step in which all sequences decode."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    with LLM(model, seed=0, **settings) as llm:
        asked: list[Prompt] = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        times = [output.metrics for output in outputs if output.metrics is not None]
        first = max(metrics.first_token_s or 0.0 for metrics in times)
        last = max(metrics.finished_s or 0.0 for metrics in times)
    return (last - first) / (answer - 1) * 1e3


def measure_layer(folder: Path, is_quick: bool) -> Result:
    return measure_layers(folder, num_steps=20 if is_quick else 300)


MEASUREMENTS = {
    "equality": measure_equality,
    "capacity": measure_capacity,
    "speed": measure_speed,
    "overlap": measure_overlap,
    "layer": measure_layer,
}

if __name__ == "__main__":
    main()
