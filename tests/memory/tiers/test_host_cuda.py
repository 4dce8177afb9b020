"""Pages of device memory are copied to host memory and a disk tier, on a fake driver."""

from __future__ import annotations

import collections
import random
import threading

import pytest

from memory.kv_manager import KVManager
from memory.pages.cuda_device import CudaError, CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory
from memory.tiers.cuda_copy import CudaCopier
from memory.tiers.disk_tier import DiskTier
from memory.tiers.host_tier import HostTier
from tests.support.cuda.fakes_cuda import CUresult, FakeDriver
from tests.support.memory.late_store import LateStore, content

PAGE = 4096
TOKENS = 4  # tokens per page
EMPTY = (0, 0, 0, 0)
UNKNOWN = CUresult.CUDA_ERROR_UNKNOWN


class Device:
    """A KV manager on device memory with a host tier behind its prefix cache."""

    def __init__(self, num_pages: int, host_pages: int, below=None, driver=None) -> None:
        self.driver = driver or FakeDriver(granularity=PAGE)
        self.memory = CudaMemory(PAGE, num_pages, driver=self.driver)
        self.kv = KVManager(
            self.memory,
            num_pages=num_pages,
            num_ranges=3,
            max_model_len=8 * TOKENS,
            token_bytes=PAGE // TOKENS,
            in_background=False,
        )
        self.base = self.memory.reserve(self.kv.total_bytes)
        copier = CudaCopier(driver=self.driver)
        self.now_s = 0.0
        self.tier = HostTier(PAGE, host_pages * PAGE, copier, below)
        self.kv.prefixes.use_store(
            self.tier, self.memory.page_address, self.memory.keep_pages, lambda: self.now_s
        )

    def compute(self, keys: list[bytes]) -> None:
        """A sequence is opened, written by kernels that end late, and closed."""
        target = self.kv.open(len(keys) * TOKENS)
        assert self.kv.grow(target, len(keys) * TOKENS)
        self.kv.commit()
        start = self.base + target.index * self.kv.range_tokens * self.kv.token_bytes
        for slot, key in enumerate(keys):
            self.driver.launch(start + slot * PAGE, content(key, PAGE))
        self.kv.insert_prefix(target, keys, len(keys) * TOKENS)
        self.kv.close(target)

    def find(self, keys: list[bytes]) -> int:
        """Returns how many of the pages a sequence finds, after their bytes are checked."""
        if self.kv.fetch(keys):
            self.settle()
        hit = self.kv.match(keys, len(keys) * TOKENS)
        if hit is None:
            return 0
        target = self.kv.open(hit.num_tokens, hit)
        self.kv.commit()
        assert self.driver.cuStreamSynchronize(0) == (CUresult.CUDA_SUCCESS,)
        for slot in range(len(target.pages)):
            start = (
                self.base + target.index * self.kv.range_tokens * self.kv.token_bytes + slot * PAGE
            )
            assert self.driver.read(start, PAGE) == content(keys[slot], PAGE)
        self.kv.close(target)
        return hit.num_tokens // TOKENS

    def settle(self) -> None:
        """Waits until everything is stored and no transfer is in flight."""
        while self.kv.prefixes.write_unwritten() or self.kv.prefixes.is_transferring:
            self.kv.prefixes.wait(10)
            self.now_s += not self.kv.prefixes.is_transferring  # a pause after failures
        self.kv.check_integrity()

    def close(self) -> None:
        self.kv.close_all()
        self.memory.close()

    @property
    def is_empty(self) -> bool:
        driver = self.driver
        return driver.num_live == EMPTY and driver.num_live_host == (0, 0, 0)


def sequence(number: int, num_pages: int = 4) -> list[bytes]:
    return [b"%d page %d" % (number, slot) for slot in range(num_pages)]


@pytest.fixture
def driver():
    driver = FakeDriver(granularity=PAGE)
    driver.cuInit(0)
    return driver


def test_evicted_pages_are_loaded_from_host_memory():
    device = Device(num_pages=12, host_pages=64)
    for number in range(9):  # three times the device's capacity
        device.compute(sequence(number))
        device.settle()
    assert device.kv.prefixes.stats.num_evicted >= 24
    for number in range(9):
        assert device.find(sequence(number)) == 4
    assert device.kv.prefixes.stats.num_loaded >= 24
    stats = device.tier.host_stats()
    assert stats.hits == device.kv.prefixes.stats.num_loaded
    assert (stats.misses, stats.lost, stats.copy_errors) == (0, 0, 0)
    device.close()
    assert device.is_empty
    assert device.driver.used_bytes == 0


def test_two_tiers_hold_more_than_host_memory(tmp_path):
    """After a restart the disk still has all pages."""

    def open_disk() -> DiskTier:
        return DiskTier(tmp_path, PAGE, 64 * PAGE, b"m", "threads", persistent=True)

    device = Device(num_pages=8, host_pages=6, below=open_disk())
    for number in range(10):
        device.compute(sequence(number))
        device.settle()
    for number in range(10):
        assert device.find(sequence(number)) == 4
    stats = device.tier.host_stats()
    assert stats.hits_below > 0 and stats.pushed_down >= 30
    assert (stats.misses, stats.lost) == (0, 0)
    assert stats.bytes_used <= 6 * PAGE
    device.close()
    assert device.is_empty
    device = Device(num_pages=8, host_pages=6, below=open_disk())
    for number in range(10):
        assert device.find(sequence(number)) == 4
    device.close()
    assert device.is_empty


class WatchedDriver(FakeDriver):
    """Remembers which thread made which calls."""

    def __init__(self) -> None:
        super().__init__(granularity=PAGE)
        self.calls_of: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def enter(self, call: str, needs_context: bool) -> None:
        self.calls_of[threading.current_thread().name][call] += 1
        super().enter(call, needs_context)


def test_the_compute_thread_neither_copies_nor_waits():
    device = Device(num_pages=8, host_pages=16, driver=WatchedDriver())
    device.compute(sequence(0))
    device.settle()
    calls = device.driver.calls_of
    before = calls["MainThread"].copy()
    page = next(iter(device.kv.prefixes.index.pages))
    addressed = [(b"other", device.memory.page_address(page))]
    assert device.tier.store_many(addressed)[0].result(10)
    assert device.tier.load_many(addressed)[0].result(10)
    used = calls["MainThread"] - before
    assert used == {"cuCtxGetCurrent": 2, "cuEventRecord": 2, "cuStreamWaitEvent": 2}
    assert calls["mergestep-host"]["cuMemcpyDtoHAsync"] == 5
    assert calls["mergestep-host"]["cuMemcpyHtoDAsync"] == 1
    assert "cuStreamSynchronize" not in calls["mergestep-host"]
    device.close()


def test_copies_follow_earlier_kernels(driver):
    """In both directions, a late kernel of the page's former owner does not overwrite the load."""
    memory = CudaMemory(PAGE, 2, driver=driver)
    memory.reserve(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, CudaCopier(driver=driver))
    address = memory.page_address(0)
    driver.launch(address, content(b"key", PAGE))
    assert tier.store_many([(b"key", address)])[0].result(10)
    driver.launch(address, b"late")
    assert tier.load_many([(b"key", address)])[0].result(10)
    driver.cuCtxSynchronize()
    assert driver.read(address, PAGE) == content(b"key", PAGE)
    tier.close()
    memory.close()
    assert (driver.num_live, driver.num_live_host) == (EMPTY, (0, 0, 0))


def test_kernels_of_another_stream_are_followed(driver):
    memory = CudaMemory(PAGE, 1, driver=driver)
    memory.reserve(PAGE)
    stream = driver.cuStreamCreate(1)[1]
    copier = CudaCopier(driver=driver, compute_stream=stream)
    host = copier.allocate(PAGE)
    assert host % 4096 == 0
    address = memory.page_address(0)
    driver.queue(stream, lambda: driver.write(address, content(b"key", PAGE)))
    copier.follow()
    assert copier.copy([(host, address)], PAGE, to_host=True)
    driver.write(address, bytes(PAGE))
    assert copier.copy([(address, host)], PAGE, to_host=False)
    assert driver.read(address, PAGE) == content(b"key", PAGE)
    copier.close()
    with pytest.raises(CudaError, match="closed"):
        copier.follow()
    memory.close()
    assert (driver.num_live, driver.num_live_host) == (EMPTY, (0, 1, 0))


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuEventCreate", "cuDevicePrimaryCtxRetain"])
def test_a_copier_that_cannot_be_made_frees_everything(driver, call):
    driver.fail(call, UNKNOWN, after=call == "cuEventCreate")
    with pytest.raises((CudaError, CudaUnavailableError), match=call):
        CudaCopier(driver=driver)
    assert (driver.num_live, driver.num_live_host) == (EMPTY, (0, 0, 0))


def test_missing_host_memory_is_an_error_at_start_up(driver):
    copier = CudaCopier(driver=driver)
    driver.fail("cuMemHostAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        HostTier(PAGE, 4 * PAGE, copier)
    copier.close()
    assert (driver.num_live, driver.num_live_host) == (EMPTY, (0, 0, 0))


@pytest.mark.parametrize(
    "call",
    ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery", "cuEventRecord"],
)
def test_a_driver_that_fails_is_a_miss(call):
    device = Device(num_pages=8, host_pages=64)
    for number in range(6):
        device.driver.fail(call, UNKNOWN, after=number)
        device.compute(sequence(number))
        device.settle()
        device.find(sequence(number // 2))
    assert (device.kv.prefixes.stats.num_failed > 0) == (call != "cuMemcpyHtoDAsync")
    device.driver.fail_no_more()
    for number in range(6):
        device.compute(sequence(number))
        device.settle()
        assert device.find(sequence(number)) == 4
    assert not device.tier._worker.is_broken
    device.close()
    assert device.is_empty


def test_a_lost_device_stops_the_tier(caplog):
    """Memory that a copy may still use is not freed, the rest is, and every later lookup is a
    miss."""
    device = Device(num_pages=8, host_pages=16)
    device.compute(sequence(0))
    device.settle()
    device.driver.fail("cuEventQuery", UNKNOWN)
    device.driver.fail("cuStreamSynchronize", UNKNOWN)
    device.compute(sequence(1))
    device.settle()
    assert device.kv.prefixes.stats.num_stored == 4
    assert not device.tier.contains(sequence(0)[0])
    device.compute(sequence(2))
    device.settle()
    assert device.find(sequence(2)) == 4, "the device's own prefix cache still works"
    device.close()
    assert "out of order (" in caplog.text
    _, num_mapped, *remaining = device.driver.num_live
    assert remaining == [1, 2], "pages that a late copy may use stay allocated"
    assert num_mapped * PAGE == device.driver.used_bytes > 0
    assert device.driver.num_live_host == (1, 1, 2)


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_find_their_own_bytes(seed):
    """`find` compares the bytes; the store below is late, and it and the driver refuse or fail
    at times."""
    numbers = random.Random(seed)
    below = LateStore(PAGE)
    device = Device(num_pages=10, host_pages=numbers.randint(1, 8), below=below)
    calls = ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery", "cuStreamWaitEvent"]
    num_found = 0
    for _ in range(120):
        below.mode = numbers.choice(["at once"] * 4 + ["refused", "failing"])
        if numbers.random() < 0.2:
            device.driver.fail(numbers.choice(calls), UNKNOWN, after=numbers.randrange(3))
        keys = sequence(numbers.randrange(10), numbers.randint(1, 6))
        if numbers.random() < 0.5:
            device.compute(keys)
        else:
            num_found += device.find(keys)
        if numbers.random() < 0.1:
            device.settle()
            device.kv.trim()
    assert num_found > 20
    assert not device.tier._worker.is_broken
    below.mode = "at once"
    device.close()
    assert device.is_empty and below.num_closed == 1
    assert device.driver.used_bytes == 0


def test_the_fake_streams_are_strict(driver):
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    memory = CudaMemory(PAGE, 1, driver=driver)
    memory.reserve(PAGE)
    address = memory.page_address(0)
    invalid, unknown = CUresult.CUDA_ERROR_INVALID_VALUE, CUresult.CUDA_ERROR_INVALID_HANDLE
    stream, event = driver.cuStreamCreate(1)[1], driver.cuEventCreate(2)[1]
    host = driver.cuMemHostAlloc(PAGE, 0)[1]
    assert driver.cuMemcpyDtoHAsync(host + 1, address, PAGE, stream) == (invalid,), (
        "the copy exceeds the allocation"
    )
    assert driver.cuMemcpyHtoDAsync(address, host, PAGE, stream + 9) == (unknown,)
    assert driver.cuEventRecord(event + 9, stream) == (unknown,)
    assert driver.cuEventQuery(event) == (CUresult.CUDA_SUCCESS,), (
        "nothing is recorded in the event"
    )
    driver.write(address, b"first")
    driver.cuMemcpyDtoHAsync(host, address, PAGE, stream)
    driver.cuEventRecord(event, stream)
    with pytest.raises(AssertionError, match="work is queued"):
        driver.cuStreamDestroy(stream)
    assert driver.cuEventQuery(event) == (CUresult.CUDA_ERROR_NOT_READY,)
    assert driver.cuEventQuery(event) == (CUresult.CUDA_SUCCESS,)
    driver.cuMemcpyHtoDAsync(address, host, PAGE, stream)
    driver.cuMemFreeHost(host)
    assert driver.cuMemFreeHost(host) == (invalid,)
    assert driver.cuStreamSynchronize(stream) == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    assert driver.cuEventQuery(event) == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), (
        "the context is dead"
    )
