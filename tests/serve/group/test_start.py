"""What the start of a group tells: how far workers are, and what each rank takes."""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ops.cpu import native_library
from serve import LLM
from serve.config import EngineConfig
from serve.group import start
from serve.group.grid import Grid
from serve.group.links import messages
from serve.group.links.messages import Kind
from serve.group.links.worker_link import WorkerLink
from serve.group.room import weight_bytes_of_ranks
from serve.loading.footprint import weight_bytes
from serve.loading.model_source import read_source
from tests.serve.group.test_group_engine import SETTINGS
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import ThreadWorkers, thread_workers  # noqa: F401
from transport import connect, listen
from transport.base import Endpoint


def connected(name: str) -> tuple[Endpoint, Endpoint]:
    key = secrets.token_bytes(32)
    listener = listen(f"inproc://{name}", key=key)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 5.0)
        worker = connect(listener.url, key=key)
        engine = accepted.result()
    listener.close()
    assert engine is not None
    return engine, worker


def test_the_slowest_worker_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(start, "REPORT_S", 0.01)
    told = threading.Event()
    ends = [connected(f"progress-{rank}") for rank in (1, 2)]
    links = [WorkerLink(rank, engine, None) for rank, (engine, _) in enumerate(ends, 1)]
    source = read_source(EngineConfig(str(checkpoint("llama", "four"))))
    workers = ThreadWorkers()
    loader = start.WorkerLoader(workers, source, Grid(1, ((0, 5), (5, 1), (6, 4))))

    def work() -> None:
        for (_, worker), num_layers in zip(ends, (0, 3), strict=True):
            messages.post(worker, messages.pack_json(Kind.PROGRESS, 0, {"layers": num_layers}))
        told.wait(5.0)
        for number, (_, worker) in enumerate(ends, 1):
            content = {"url": f"inproc://{number}", "free_bytes": number}
            messages.post(worker, messages.pack_json(Kind.READY, 0, content))

    def check() -> None:
        if any("3 of 5" in record.getMessage() for record in caplog.records):
            told.set()

    thread = threading.Thread(target=work)
    thread.start()
    with caplog.at_level(logging.INFO, logger="serve.group.start"):
        loader.await_ready(links, check)
    thread.join()
    workers.close()
    for engine, worker in ends:
        engine.close()
        worker.close()
    assert "rank 2 has 3 of 5 layers; 2 of 2 workers are still loading" in caplog.text
    assert [link.free_bytes for link in links] == [1, 2]


@pytest.mark.parametrize(
    ("grid", "line"),
    [
        ((2, 1), "2 ranks: 1 stage of 2 tensor ranks, 1 thread each; weights of a rank: layers 0"),
        ((1, 2), "2 ranks: 2 stages of 1 tensor rank, 1 thread each; weights of a rank: layers 0"),
    ],
)
@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_the_start_tells_the_grid_and_bytes(thread_workers, caplog, grid, line):  # noqa: F811
    tensor, stages = grid
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    with (
        caplog.at_level(logging.INFO),
        LLM(
            str(checkpoint("llama")),
            compute_threads=1,
            kv_cache_bytes=1 << 20,
            **SETTINGS,
            **settings,
        ),
    ):
        pass
    assert line in caplog.text
    assert " KiB" in caplog.text.partition(line)[2]
    assert "tokens on each rank (" in caplog.text


@pytest.mark.parametrize("variant", ["base", "tied"])
def test_ranks_divide_the_weights(variant):
    source = read_source(EngineConfig(str(checkpoint("llama", variant))))
    whole = weight_bytes(*source[:3])
    num_layers = source.spec.num_layers
    [half] = weight_bytes_of_ranks(source, Grid(2, ((0, num_layers),)))
    assert 2 * half == pytest.approx(whole.total + whole.others, abs=2)
    first, last = weight_bytes_of_ranks(source, Grid(1, ((0, 1), (1, num_layers - 1))))
    assert first + last == pytest.approx(whole.total, rel=0.02)
    assert last - first == pytest.approx(
        whole.blocks * (num_layers - 2) / num_layers + whole.head - whole.tables, rel=0.02
    )
