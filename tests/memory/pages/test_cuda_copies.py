"""Copies beside kernels (memory/pages/cuda_copies.py) on a fake driver whose streams run as late as
possible."""

from __future__ import annotations

import ctypes

import pytest
import torch

from memory.nodes.staging import DeviceStaging
from memory.pages.cuda_copies import CudaCopies
from memory.pages.cuda_device import CudaError
from memory.pages.cuda_vmm import CudaMemory
from tests.support.cuda.cuda_memory import EMPTY, PAGE, driver
from tests.support.cuda.fakes_cuda import CUresult

__all__ = ["driver"]

NO_HOST = (0, 0, 0)


class DeviceTensor:
    """A dense tensor in the fake device's memory, as far as copies look at it."""

    dtype = torch.float32

    def __init__(self, address: int, count: int) -> None:
        self.address, self.count = address, count

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> DeviceTensor:
        return self

    @property
    def shape(self) -> tuple[int]:
        return (self.count,)

    def __getitem__(self, rows: slice) -> DeviceTensor:
        start, end, _ = rows.indices(self.count)
        return DeviceTensor(self.address + 4 * start, end - start)


class Copies(CudaCopies):
    """Copies whose results are in the fake device's memory, from `address` on."""

    address = 0

    def empty(self, like):
        return DeviceTensor(self.address, like.numel())


@pytest.fixture
def device(driver):
    """Yields device memory, mapped and full of garbage, and copies; all is freed in the end."""
    memory = CudaMemory(PAGE, 4, driver=driver)
    base = memory.reserve(4 * PAGE)
    memory.map(0, 0, 4)
    copies = Copies(device=torch.device("cuda"), compute_stream=0, driver=driver)
    copies.address = base + 2 * PAGE
    yield base, copies
    copies.close()
    memory.close()
    assert driver.num_live == EMPTY and driver.num_live_host == NO_HOST


def floats(driver, address: int, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(driver.read(address, 4 * count)), dtype=torch.float32)


def launch(driver, address: int, x: torch.Tensor) -> None:
    """Queues a kernel that writes x."""
    driver.launch(address, ctypes.string_at(x.data_ptr(), 4 * x.numel()))


def test_rows_are_copied_after_the_kernels_before_and_beside_those_after(driver, device):
    base, copies = device
    x = torch.randn(8)
    launch(driver, base, x)
    host = copies.pinned(32).view(torch.float32)
    copy = copies.to_host([(host, DeviceTensor(base, 8))])
    late = []
    driver.queue(0, lambda: late.append("a later kernel"))
    assert not torch.equal(host, x), "nothing has run"
    copy.wait()
    assert torch.equal(host, x)
    assert late == [], "later kernels are not waited for"


def test_a_result_is_on_the_device_before_later_kernels(driver, device):
    _, copies = device
    host = copies.pinned(32).view(torch.float32)
    x = torch.randn(8)
    host.copy_(x)
    target, copy = copies.to_device(host)
    seen = []
    driver.queue(0, lambda: seen.append(floats(driver, target.data_ptr(), 8)))
    assert not copy.is_over and seen == []
    driver.cuStreamSynchronize(0)
    assert torch.equal(seen[0], x) and copy.is_over


def test_the_buffers_of_staging_on_the_driver(driver, device):
    """A buffer that a copy to the device reads is not used until the device has passed it."""
    base, copies = device
    staging = DeviceStaging(copies)
    first, second = torch.full((8,), 1.0), torch.full((8,), 2.0)
    staging.receive(first)
    copies.address += 64
    staging.receive(second)  # the first copy has not run: another buffer
    assert staging.buffers.num_made == 2
    driver.cuStreamSynchronize(0)
    assert torch.equal(floats(driver, copies.address - 64, 8), first)
    assert torch.equal(floats(driver, copies.address, 8), second)
    for number in range(20):
        launch(driver, base, torch.full((8,), float(number)))
        sent = []
        staging.send([DeviceTensor(base, 8)], (2, 5), lambda rows, sent=sent: sent.extend(rows))
        staging.flush()
        assert torch.equal(sent[0][2:5], torch.full((3,), float(number)))
        staging.receive(sent[0].clone())
        driver.cuStreamSynchronize(0)
    assert staging.buffers.num_made == 2 and staging.buffers.num_taken == 0
    assert driver.calls["cuMemHostAlloc"] == 2
    assert driver.calls["cuEventCreate"] <= 5, "events are used again"


def send_and_receive(staging, base):
    staging.send([DeviceTensor(base, 8)], (0, 8), lambda rows: None)
    staging.receive(torch.zeros(8))


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_a_failed_call_leaves_no_copy_behind(driver, device, call):
    base, copies = device
    staging = DeviceStaging(copies)
    driver.fail(call, CUresult.CUDA_ERROR_UNKNOWN)
    with pytest.raises(CudaError, match=call):
        send_and_receive(staging, base)
    staging.reset()
    assert staging.buffers.num_taken == 0


def test_a_fault_of_the_device_is_raised_by_the_wait(driver, device):
    base, copies = device
    host = copies.pinned(32).view(torch.float32)
    copy = copies.to_host([(host, DeviceTensor(base, 8))])
    driver.fail("cuEventQuery", CUresult.CUDA_ERROR_UNKNOWN)
    with pytest.raises(CudaError, match="cuEventQuery"):
        copy.wait()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copies_on_a_gpu():
    """Copies run between kernels in the order in which they were launched."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        copies = CudaCopies(
            device=device, compute_stream=stream.cuda_stream, index=device.index or 0
        )
        staging = DeviceStaging(copies)
        x = torch.zeros(1 << 20, device=device)
        for number in range(50):
            x += 1
            sent = []
            staging.send([x.clone()], (7, 1 << 19), lambda rows, sent=sent: sent.extend(rows))
            x += 1
            staging.flush()
            assert (sent[0][7 : 1 << 19] == 2 * number + 1).all()
            back = staging.receive(sent[0][7 : 1 << 19])
            assert float((back - x[7 : 1 << 19]).max()) == -1.0
        assert staging.buffers.num_taken == 0 and staging.buffers.num_made <= 4
        staging.close()
