"""Several threads and another library use device memory at once, on a fake driver."""

from __future__ import annotations

import errno
import threading

import pytest

from memory.pages.cuda_device import CudaError
from memory.pages.cuda_vmm import CudaMemory
from tests.support.cuda.cuda_memory import EMPTY, PAGE, driver, memory
from tests.support.cuda.fakes_cuda import CUresult

__all__ = ["driver", "memory"]

NO_MEMORY = CUresult.CUDA_ERROR_OUT_OF_MEMORY


def test_every_thread_gets_the_context_once(driver, memory):
    memory.reserve(16 * PAGE)

    def work(page: int) -> None:
        memory.prepare(page, 2)
        memory.map(page * PAGE, page, 2)

    for page in range(0, 16, 2):
        thread = threading.Thread(target=work, args=(page,))
        thread.start()
        thread.join()
    memory.unmap(0, 16)
    assert driver.calls["cuCtxSetCurrent"] == 9
    thread = threading.Thread(target=memory.close)
    thread.start()
    thread.join()
    assert driver.num_live == EMPTY


def test_another_library_may_use_the_context_too(driver):
    first, second = (CudaMemory(PAGE, 2, driver=driver) for _ in range(2))
    first.reserve(PAGE)
    first.close()
    second.reserve(PAGE)
    second.map(0, 0, 1)
    second.close()
    assert driver.num_live == EMPTY


def test_a_page_is_created_once(driver, memory):
    """Several threads prepare it; `map` uses the handle that another thread is creating."""
    memory.reserve(16 * PAGE)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        memory.prepare(0, 16)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    memory.map(0, 0, 16)
    for thread in threads:
        thread.join()
    assert driver.calls["cuMemCreate"] == 16


def test_a_failed_create_wakes_the_waiting_thread(driver, memory, monkeypatch):
    """The second thread waits for the first one's page and then creates it itself."""
    memory.reserve(PAGE)
    begun, may_end = threading.Event(), threading.Event()
    create = driver.cuMemCreate

    def slow(*arguments: object) -> tuple[object, ...]:
        begun.set()
        assert may_end.wait(10)
        monkeypatch.setattr(driver, "cuMemCreate", create)
        return NO_MEMORY, None

    monkeypatch.setattr(driver, "cuMemCreate", slow)
    failed = []

    def prepare() -> None:
        try:
            memory.prepare(0, 1)
        except CudaError as error:
            failed.append(error.errno)

    first = threading.Thread(target=prepare)
    first.start()
    assert begun.wait(10)
    second = threading.Thread(target=prepare)
    second.start()
    may_end.set()
    first.join()
    second.join()
    assert failed == [errno.ENOMEM]
    assert len(driver.handles) == 1


def test_closing_waits_for_a_page_that_is_being_created(driver, memory, monkeypatch):
    memory.reserve(4 * PAGE)
    begun, may_end = threading.Event(), threading.Event()
    create = driver.cuMemCreate

    def slow(*arguments: object) -> tuple[object, ...]:
        begun.set()
        assert may_end.wait(10)
        return create(*arguments)

    monkeypatch.setattr(driver, "cuMemCreate", slow)
    numbers = []

    def prepare() -> None:
        try:
            memory.prepare(0, 4)
        except CudaError as error:
            numbers.append(error.errno)

    preparing = threading.Thread(target=prepare)
    preparing.start()
    assert begun.wait(10)
    closing = threading.Thread(target=memory.close)
    closing.start()
    while not memory._is_closed:
        pass
    may_end.set()
    preparing.join()
    closing.join()
    assert numbers == [errno.EBADF]
    assert driver.num_live == EMPTY
    with pytest.raises(CudaError, match="closed"):
        memory.prepare(0, 1)
