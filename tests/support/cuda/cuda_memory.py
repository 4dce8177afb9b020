"""Fixtures: device memory on a fake driver that is as strict as the real one."""

from __future__ import annotations

import pytest

from memory.pages.cuda_vmm import CudaMemory
from tests.support.cuda.fakes_cuda import FakeDriver

PAGE = 4096
EMPTY = (0, 0, 0, 0)


@pytest.fixture
def driver():
    return FakeDriver(granularity=PAGE)


@pytest.fixture
def memory(driver):
    """Checks that every test frees all of its device memory."""
    memory = CudaMemory(PAGE, 16, driver=driver)
    yield memory
    memory.close()
    assert driver.num_live == EMPTY
    assert driver.used_bytes == 0
