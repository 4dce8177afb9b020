"""Checks what each call does to device memory, on a fake driver that is as strict as the real
one."""

from __future__ import annotations

import contextlib
import errno
import importlib

import pytest
import torch

from memory.pages.cuda_device import CudaError, CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory, torch_view
from tests.support.cuda.cuda_memory import EMPTY, PAGE, driver, memory
from tests.support.cuda.fakes_cuda import CUdevice_attribute, CUresult, FakeDriver, IllegalAddress

__all__ = ["driver", "memory"]

NO_MEMORY = CUresult.CUDA_ERROR_OUT_OF_MEMORY
UNKNOWN = CUresult.CUDA_ERROR_UNKNOWN


def test_one_map_for_each_page_and_one_access_for_all(driver, memory):
    base = memory.reserve(16 * PAGE)
    memory.prepare(0, 8)
    memory.map(2 * PAGE, 0, 8)
    assert driver.calls["cuMemCreate"] == driver.calls["cuMemMap"] == 8
    assert driver.calls["cuMemSetAccess"] == 1
    driver.write(base + 2 * PAGE, bytes(8 * PAGE))
    memory.map(0, 0, 2)
    memory.unmap(0, 10)
    assert driver.calls["cuMemUnmap"] == 1, "adjacent mappings go in one call"
    assert driver.num_live == (8, 0, 1, 1)


def test_an_unmapped_page_is_no_memory(driver, memory):
    base = memory.reserve(4 * PAGE)
    memory.map(PAGE, 0, 1)
    driver.write(base + PAGE, bytes(PAGE))
    with pytest.raises(IllegalAddress):
        driver.write(base + 2 * PAGE - 1, b"xx")


@pytest.mark.parametrize(
    ("call", "error", "number"),
    [
        ("cuMemCreate", NO_MEMORY, errno.ENOMEM),
        ("cuMemMap", NO_MEMORY, errno.ENOMEM),
        ("cuMemMap", UNKNOWN, errno.EIO),
    ],
)
def test_a_partial_mapping_is_undone(driver, memory, call, error, number):
    base = memory.reserve(16 * PAGE)
    memory.map(0, 8, 1)
    driver.fail(call, error, after=2)
    with pytest.raises(CudaError, match=f"{call}: {error.name}") as caught:
        memory.map(PAGE, 0, 4)
    assert caught.value.errno == number
    assert list(driver.mappings) == [base]
    memory.map(PAGE, 0, 4)
    driver.write(base, bytes(5 * PAGE))


def test_a_mapping_without_access_is_undone(driver, memory):
    """The driver fails so once a context has about 520,000 mappings."""
    memory.reserve(16 * PAGE)
    driver.fail("cuMemSetAccess", NO_MEMORY)
    with pytest.raises(OSError, match="cuMemSetAccess: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.map(PAGE, 0, 4)
    assert not driver.mappings


def test_a_mapping_that_could_not_be_undone_is_replaced(driver, memory):
    base = memory.reserve(16 * PAGE)
    driver.fail("cuMemMap", NO_MEMORY, after=2)
    driver.fail("cuMemUnmap", UNKNOWN)
    with pytest.raises(CudaError, match="cuMemMap: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.map(0, 0, 4)
    assert len(driver.mappings) == 2
    memory.map(0, 4, 4)
    driver.write(base, bytes(4 * PAGE))


def test_memory_runs_out_while_preparing(driver, memory):
    memory.reserve(16 * PAGE)
    driver.memory_bytes = 3 * PAGE
    with pytest.raises(CudaError, match="cuMemCreate") as caught:
        memory.prepare(0, 4)
    assert caught.value.errno == errno.ENOMEM
    memory.map(0, 0, 3)
    memory.unmap(0, 3)
    memory.release(0, 3)
    memory.map(0, 8, 3)


def test_kernels_end_before_their_addresses_go(driver, memory):
    base = memory.reserve(8 * PAGE)
    memory.map(0, 0, 2)
    driver.launch(base + PAGE, b"written")
    memory.unmap(0, 2)
    memory.map(4 * PAGE, 1, 1)
    driver.launch(base + 4 * PAGE + 7, b" twice")
    memory.map(4 * PAGE, 0, 1)  # replaces
    memory.map(0, 1, 1)
    assert driver.read(base, 13) == b"written twice"
    driver.launch(base, b"late")
    memory.close()
    memory.close()
    assert driver.num_live == EMPTY


def test_nothing_is_unmapped_if_waiting_fails(driver, memory):
    memory.reserve(4 * PAGE)
    memory.map(0, 0, 2)
    driver.fail("cuCtxSynchronize", UNKNOWN)
    with pytest.raises(CudaError, match="cuCtxSynchronize"):
        memory.unmap(0, 2)
    assert len(driver.mappings) == 2


def test_the_synchronize_argument_replaces_the_drivers_wait(driver):
    waits = []
    memory = CudaMemory(PAGE, 4, driver=driver, synchronize=lambda: waits.append(1))
    memory.reserve(4 * PAGE)
    memory.map(0, 0, 2)
    memory.unmap(2 * PAGE, 2)
    assert not waits, "no page is mapped there"
    memory.unmap(0, 2)
    memory.close()
    assert len(waits) == 2
    assert not driver.calls["cuCtxSynchronize"]


def test_release_gives_memory_back(driver, memory):
    memory.reserve(8 * PAGE)
    memory.map(0, 0, 3)
    memory.map(4 * PAGE, 1, 1)
    memory.unmap(0, 3)
    with pytest.raises(CudaError, match=r"pages \[1\] are mapped") as caught:
        memory.release(0, 4)
    assert caught.value.errno == errno.EBUSY
    assert driver.used_bytes == PAGE
    memory.unmap(4 * PAGE, 1)
    driver.fail("cuMemRelease", UNKNOWN)
    with pytest.raises(CudaError, match="cuMemRelease"):
        memory.release(1, 1)
    memory.release(1, 1)
    memory.release(1, 1)
    assert driver.used_bytes == 0


def test_pages_get_consecutive_addresses_of_their_own(driver, memory):
    memory.reserve(16 * PAGE)
    memory.prepare(2, 6)
    assert driver.calls["cuMemMap"] == 0, "while kernels run, only handles are created"
    first = memory.page_address(4)
    assert (driver.calls["cuMemMap"], driver.calls["cuMemSetAccess"]) == (6, 1)
    assert [memory.page_address(page) - first for page in range(2, 8)] == [
        (page - 4) * PAGE for page in range(2, 8)
    ]
    assert (driver.calls["cuMemMap"], driver.calls["cuMemSetAccess"]) == (6, 1)
    memory.prepare(8, 1)
    driver.write(memory.page_address(8), bytes(PAGE))
    assert (driver.calls["cuMemMap"], driver.calls["cuMemSetAccess"]) == (7, 2)


def test_a_page_keeps_its_own_address_until_its_release(driver, memory):
    memory.reserve(16 * PAGE)
    memory.map(0, 0, 4)
    address = memory.page_address(1)
    driver.write(address, b"kept")
    memory.unmap(0, 4)
    assert driver.read(address, 4) == b"kept"
    memory.map(0, 1, 1)
    with pytest.raises(CudaError, match=r"pages \[1\] are mapped"):
        memory.release(0, 4)
    assert driver.read(address, 4) == b"kept", "a page in use keeps its address"
    driver.launch(address, b"late")  # the kernel ends before the address goes
    memory.unmap(0, 1)
    memory.release(1, 1)
    assert not driver.mappings
    assert not driver.handles
    assert driver.cuCtxSynchronize() == (CUresult.CUDA_SUCCESS,)
    driver.write(memory.page_address(1), b"anew")


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("is_undone", [True, False])
def test_an_address_that_cannot_be_mapped(driver, memory, call, is_undone):
    """The state stays valid even where the cleanup fails: a mapping without access is no
    address."""
    memory.reserve(16 * PAGE)
    memory.prepare(0, 3)
    page = 3 if call == "cuMemCreate" else 1
    driver.fail(call, NO_MEMORY, after=0 if call != "cuMemMap" else 2)
    if not is_undone:
        driver.fail("cuMemUnmap", UNKNOWN)
    with pytest.raises(CudaError, match=call) as caught:
        memory.page_address(page)
    assert caught.value.errno == errno.ENOMEM
    driver.fail_no_more()
    for page in range(4):
        driver.write(memory.page_address(page), bytes(PAGE))
    memory.release(0, 4)
    assert driver.used_bytes == 0


def test_a_copy_runs_between_earlier_and_later_kernels(driver):
    """The copy runs in the kernels' stream, so that the host does not wait."""
    probe = CudaMemory(PAGE, 1, driver=driver)  # a stream needs a context
    stream = driver.cuStreamCreate(1)[1]
    memory = CudaMemory(PAGE, 4, driver=driver, compute_stream=stream)
    base = memory.reserve(4 * PAGE)
    memory.map(0, 0, 2)
    driver.queue(stream, lambda: driver.write(base, b"source"))
    memory.copy_page(0, 1)
    driver.queue(stream, lambda: driver.write(base, b"others"))
    assert not driver.calls["cuCtxSynchronize"] and not driver.calls["cuStreamSynchronize"]
    driver.run_all()
    assert driver.read(base, 12) == b"others" + bytes(b"\xcd" * 6)
    assert driver.read(base + PAGE, 6) == b"source"
    memory.copy_page(1, 0)
    assert driver.calls["cuMemMap"] == 4, "the second copy maps nothing"
    memory.close()
    driver.cuStreamDestroy(stream)
    probe.close()


def test_unmapping_waits_only_for_users_of_the_range(driver):
    settled = []
    memory = CudaMemory(
        PAGE, 8, driver=driver, settle=lambda first, end: settled.append((first, end))
    )
    memory.reserve(16 * PAGE)
    memory.map(2 * PAGE, 0, 4)
    assert settled == [], "no page was mapped"
    memory.map(3 * PAGE, 4, 2)
    assert settled == [(3 * PAGE, 5 * PAGE)]
    memory.unmap(2 * PAGE, 4)
    assert settled[1:] == [(2 * PAGE, 6 * PAGE)]
    assert not driver.calls["cuCtxSynchronize"]
    memory.page_address(0)
    memory.release(0, 1)
    assert driver.calls["cuCtxSynchronize"] == 1, (
        "copies through the page's own address may be in flight"
    )
    memory.close()


def test_closing_continues_after_a_failure(driver):
    memory = CudaMemory(PAGE, 4, driver=driver)
    memory.reserve(4 * PAGE)
    memory.map(0, 0, 4)
    driver.fail("cuCtxSynchronize", UNKNOWN)
    with pytest.raises(CudaError, match="cuCtxSynchronize"):
        memory.close()
    assert driver.num_live == EMPTY


def test_page_size_must_fit_the_device(driver):
    with pytest.raises(ValueError, match=f"kv_page_bytes: 6144 is not a multiple of {PAGE}"):
        CudaMemory(6144, 4, driver=driver)
    assert driver.num_live == EMPTY
    memory = CudaMemory(2 * PAGE, 4, driver=driver)
    base = memory.reserve(3 * PAGE)
    assert memory.size_bytes == 4 * PAGE
    memory.map(2 * PAGE, 0, 1)
    driver.write(base + 2 * PAGE, bytes(2 * PAGE))
    with pytest.raises(AssertionError, match="offset"):
        memory.map(PAGE, 1, 1)
    memory.close()
    assert driver.num_live == EMPTY


def test_pages_for_network_cards(driver, memory):
    memory.prepare(0, 1)
    with contextlib.closing(CudaMemory(PAGE, 1, driver=driver, for_rdma=True)) as other:
        other.prepare(0, 1)
        assert [a.is_for_rdma for a in driver.handles.values()] == [False, True]
    driver.lacks = {CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED}
    with pytest.raises(CudaUnavailableError, match="lacks GPU_DIRECT_RDMA"):
        CudaMemory(PAGE, 1, driver=driver, for_rdma=True)


def test_no_device(driver):
    with pytest.raises(CudaUnavailableError, match=r"CUDA device 3: cuDeviceGet: .*_DEVICE"):
        CudaMemory(PAGE, 1, driver=driver, device=3)
    driver.fail("cuInit", CUresult.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(CudaUnavailableError, match="CUDA_ERROR_NO_DEVICE"):
        CudaMemory(PAGE, 1, driver=driver)
    driver.fail("cuMemGetAllocationGranularity", UNKNOWN)
    with pytest.raises(CudaUnavailableError, match="Granularity: CUDA_ERROR_UNKNOWN"):
        CudaMemory(PAGE, 1, driver=driver)
    driver.lacks = {CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED}
    with pytest.raises(CudaUnavailableError, match="lacks VIRTUAL_MEMORY_MANAGEMENT"):
        CudaMemory(PAGE, 1, driver=driver)
    assert driver.num_live == EMPTY


def test_no_package_and_no_driver(driver, monkeypatch):
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(CudaUnavailableError, match=r"pip install 'mergestep\[cuda\]'"):
        CudaMemory(PAGE, 1)

    def no_library(flags: int) -> object:
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setattr(importlib, "import_module", lambda name: driver)
    monkeypatch.setattr(driver, "cuInit", no_library)
    with pytest.raises(CudaUnavailableError, match=r"device 0: libcuda.so.1 was not found"):
        CudaMemory(PAGE, 1)


@pytest.mark.parametrize("mapped", [[], [0], [3]])
def test_torch_sees_the_reservation(driver, memory, monkeypatch, mapped):
    """torch asks the driver about the first address, which may be unmapped."""
    base = memory.reserve(4 * PAGE)
    for slot in mapped:
        memory.map(slot * PAGE, slot, 1)

    def as_tensor(data: object, device: str) -> str:
        interface = data.__cuda_array_interface__
        assert (interface["typestr"], interface["version"]) == ("|u1", 3)
        assert (interface["shape"], interface["data"]) == ((4 * PAGE,), (base, False))
        driver.read(base, 1)
        return device

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert torch_view(memory) == "cuda:0"
    assert sorted(driver.mappings) == [base + slot * PAGE for slot in mapped]


def test_the_fake_driver_is_strict():
    """A real driver refuses each of these calls or leaves it undefined."""
    driver = FakeDriver(granularity=PAGE)
    invalid, no_context = (CUresult.CUDA_ERROR_INVALID_VALUE,), CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert driver.cuMemAddressReserve(PAGE, 0, 0, 0)[0] == CUresult.CUDA_ERROR_NOT_INITIALIZED
    driver.cuInit(0)
    assert driver.cuMemAddressReserve(PAGE, 0, 0, 0) == (no_context, None)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    memory = CudaMemory(2 * PAGE, 4, driver=driver)
    base = memory.reserve(8 * PAGE)
    memory.map(0, 0, 2)
    handle = min(driver.handles)
    assert driver.cuMemMap(base + PAGE, PAGE, 0, handle, 0) == invalid, "overlaps"
    assert driver.cuMemMap(base + 5 * PAGE - 1, PAGE, 0, handle, 0) == invalid, "not aligned"
    assert driver.cuMemMap(base - PAGE, 2 * PAGE, 0, handle, 0) == invalid, "outside"
    assert driver.cuMemMap(base + 4 * PAGE, 3 * PAGE, 0, handle, 0) == invalid, (
        "beyond the handle's size"
    )
    assert driver.cuMemUnmap(base, PAGE) == invalid, "part of a mapping"
    assert driver.cuMemUnmap(base + PAGE, 3 * PAGE) == invalid, "part of a mapping"
    assert driver.cuMemUnmap(base, 6 * PAGE) == invalid, "an unmapped page between"
    assert driver.cuMemAddressFree(base, 8 * PAGE) == invalid, "pages are mapped"
    assert driver.cuMemMap(base + 4 * PAGE, 2 * PAGE, 0, handle, 0) == (CUresult.CUDA_SUCCESS,)
    with pytest.raises(IllegalAddress):
        driver.read(base + 4 * PAGE, 1)  # no access rights yet
    driver.cuMemRelease(handle)
    assert driver.used_bytes == 4 * PAGE, "mapped memory stays allocated"
    driver.read(base, 1)
    with pytest.raises(AssertionError, match="undefined"):
        driver.cuMemMap(base + 6 * PAGE, 2 * PAGE, 0, handle, 0)
    assert driver.cuMemUnmap(base, 6 * PAGE) == (CUresult.CUDA_SUCCESS,)
    assert driver.used_bytes == 2 * PAGE
    driver.launch(base, b"x")
    assert driver.cuCtxSynchronize() == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    assert driver.cuMemUnmap(base, PAGE) == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), (
        "the context is dead"
    )
