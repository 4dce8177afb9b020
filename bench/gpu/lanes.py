"""What lanes to memory nodes need of a GPU (transport/gpu.py), and how fast a stream and a host
exchange numbers. The network card is not part of it: the host's memory is the peer."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench.gpu.record import Figures, Record
from transport.gpu import RELEASED, Gpu, HostWord, StreamReceiver, dma_buf_of

_NEEDED = ("DMA_BUF_SUPPORTED", "CAN_USE_64_BIT_STREAM_MEM_OPS")
_NUM_TRIPS, _BATCH = 2048, 64
_NUM_RELEASES = 20
_PATIENCE_S = 5.0
_SETTLE_S = 2e-3


def run(record: Record) -> None:
    if not torch.cuda.is_available():
        record.put("skipped", reason="there is no GPU")
        return
    page = mmap.PAGESIZE
    memory = torch.zeros(2 * page, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    gpu = Gpu(import_module("cuda.bindings.driver"), torch.cuda.current_device())
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    handles = [stream.cuda_stream for stream in streams]
    measure(record, gpu, handles[0], handles[1], memory.data_ptr() + -memory.data_ptr() % page)


def measure(
    record: Record, gpu: Gpu, stream: Any, release_stream: Any, address: int, scale: int = 1
) -> None:
    """address: of a zeroed page of device memory. Counts are divided by scale."""
    found = record.run("support", partial(_support, gpu, address))
    if found is None or not found["64_bit_stream_ops"]:
        return
    record.run("round trip with the host", partial(_trips, gpu, stream, _NUM_TRIPS // scale))
    releases = partial(_releases, gpu, stream, release_stream, address, _NUM_RELEASES // scale)
    record.run("release of a stream that waits", releases)


def _support(gpu: Gpu, address: int) -> Figures:
    """Returns what the device says of itself, and whether it exports memory. order: 0 if peers'
    writes are not ordered, 100 if the GPU itself sees them in order, 200 if all GPUs do."""
    exports, stream_ops = (gpu.can(what) for what in _NEEDED)
    order, flushes = (
        gpu.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING"),
        gpu.can("CAN_FLUSH_REMOTE_WRITES"),
    )
    if exports:
        os.close(dma_buf_of(gpu, address, mmap.PAGESIZE))
    return {
        "dma_buf": exports,
        "64_bit_stream_ops": stream_ops,
        "flush": flushes,
        "order": order,
        "lanes": exports and stream_ops and (flushes or order >= 100),
    }


def _trips(gpu: Gpu, stream: Any, count: int) -> Figures:
    """Times round trips: the host writes a number, for which the stream waits, and the stream
    writes it back."""
    receiver = StreamReceiver(gpu, is_device_memory=False)
    to_stream, to_host = HostWord(gpu), HostWord(gpu)
    times = []
    try:
        for first in range(1, count + 1, _BATCH):
            numbers = range(first, min(first + _BATCH, count + 1))
            for number in numbers:
                receiver.wait(stream, to_stream.device_address, number)
                to_host.write(stream, number)
            time.sleep(_SETTLE_S)  # the first wait has begun
            for number in numbers:
                began_s = time.perf_counter()
                to_stream.value = number
                _spin(lambda number=number: to_host.value >= number)  # type: ignore[misc]
                times.append(time.perf_counter() - began_s)
    finally:
        to_stream.value = count + RELEASED  # a stream that is late goes on
        gpu.call("cuStreamSynchronize", stream)
        to_stream.close()
        to_host.close()
    return _figures(times)


def _releases(gpu: Gpu, stream: Any, release_stream: Any, address: int, count: int) -> Figures:
    """Times the end of a wait for device memory that another stream writes, as after the loss of a
    node."""
    receiver, progress = StreamReceiver(gpu, is_device_memory=False), HostWord(gpu)
    times = []
    for i in range(1, count + 1):
        number = 2 * i * RELEASED  # later than any release before
        receiver.wait(stream, address, number)
        progress.write(stream, i)
        time.sleep(_SETTLE_S)
        assert progress.value < i, "the stream did not wait"
        began_s = time.perf_counter()
        receiver.release(release_stream, address, number)
        _spin(lambda i=i: progress.value >= i)  # type: ignore[misc]
        times.append(time.perf_counter() - began_s)
    for each in (stream, release_stream):  # of a stream that hangs nothing could be freed
        gpu.call("cuStreamSynchronize", each)
    progress.close()
    return _figures(times)


def _spin(is_over: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + _PATIENCE_S
    while not is_over():
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"the stream did not go on within {_PATIENCE_S:g} s")


def _figures(times: list[float]) -> Figures:
    ordered = sorted(times)
    return {
        "seconds": statistics.median(ordered),
        "p99_s": ordered[len(ordered) * 99 // 100],
        "count": len(ordered),
    }
