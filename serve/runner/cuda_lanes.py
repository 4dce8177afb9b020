"""Lanes between an engine's CUDA stream and memory nodes on rdma:// (memory/nodes/engine_lanes.py),
where the device, its driver and the network card can do it."""

from __future__ import annotations

import contextlib
import logging
import mmap
from importlib import import_module

import torch
from torch import Tensor

from memory.nodes.engine_lanes import EngineLanes
from memory.nodes.lane_layout import MAX_BYTES
from memory.pages.cuda_device import CudaDevice, CudaError, CudaUnavailableError
from serve.config import EngineConfig
from serve.runner.step_device import StepDevice
from transport.gpu import Gpu, GpuUnavailableError
from transport.rdma_lane import RdmaLaneOpener

logger = logging.getLogger(__name__)

_NON_BLOCKING = 1  # CUstream_flags


def open_lanes(config: EngineConfig, device: StepDevice) -> EngineLanes | None:
    """Returns the lanes of the device's stream; None, with the reason in the log, if there can be
    none. Whether a node takes part is decided when the engine attaches to it."""
    if device.device.type != "cuda" or not any(x.startswith("rdma:") for x in config.memory_nodes):
        return None
    index = device.device.index or 0
    with contextlib.ExitStack() as undo:
        try:
            driver = import_module("cuda.bindings.driver")
            context = CudaDevice(None, index)
            undo.callback(context.close)
            release_stream = context.call("cuStreamCreate", _NON_BLOCKING)
        except (ImportError, CudaUnavailableError, CudaError) as error:
            logger.info("memory nodes: the host posts rows: %s", error)
            return None
        undo.callback(context.call, "cuStreamDestroy", release_stream)
        undo.callback(context.enter)
        free = undo.pop_all().close
    gpu = Gpu(driver, index)
    opener = RdmaLaneOpener(gpu, device.stream, release_stream, context.enter, free)
    return EngineLanes(opener, lambda n: _pages(n, device.device), config.max_num_seqs)


def reserved_bytes(config: EngineConfig, device: StepDevice) -> int:
    """Returns the most device memory that the lanes of `open_lanes` take."""
    if device.device.type != "cuda":
        return 0
    return 2 * MAX_BYTES * sum(x.startswith("rdma:") for x in config.memory_nodes)


def _pages(num_bytes: int, device: torch.device) -> Tensor:
    """Returns [num_bytes] uint8 that begin at a page."""
    try:
        memory = torch.zeros(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise GpuUnavailableError(f"no {num_bytes} bytes of device memory for a lane") from error
    torch.cuda.synchronize(device)  # before the network card reads or writes it
    first = -memory.data_ptr() % mmap.PAGESIZE
    return memory[first : first + num_bytes]
