"""A KV manager on device memory stays consistent under random operations and driver failures."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory.kv_manager import KVManager
from memory.pages.cuda_device import CudaError
from memory.pages.cuda_vmm import CudaMemory
from memory.pages.kv_range import Range
from memory.pages.layer_groups import LayerGroup
from tests.support.cuda.fakes_cuda import CUresult, FakeDriver
from tests.support.profile import examples

PAGE = 4096


class DeviceKVMachine(RuleBasedStateMachine):
    """No sequence loses a token, and nothing is allocated at the end."""

    TOKEN = 1024
    WINDOW: int | None = None
    IN_BACKGROUND = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver(granularity=PAGE)
        self.memory = CudaMemory(PAGE, 12, driver=self.driver)
        self.kv = KVManager(
            self.memory,
            num_pages=12,
            num_ranges=4,
            max_model_len=32,
            groups=[LayerGroup(self.TOKEN, window=self.WINDOW, read_block=1)],
            in_background=self.IN_BACKGROUND,
        )
        self.base = self.memory.reserve(self.kv.total_bytes)
        self.written: dict[int, bytes] = {}  # one byte for each token, by range index
        self.next_byte = 0

    def address(self, item: Range, position: int) -> int:
        return self.base + (item.start + position) * self.TOKEN

    @property
    def visible(self) -> list[Range]:
        parts = [(item, item.parts[0]) for item in self.kv.ranges]
        return [item for item, part in parts if part.num_mapped > part.num_released]

    @property
    def num_in_ranges(self) -> int:
        """Returns the number of mappings without the pages' own addresses behind the
        reservation's end."""
        end = self.base + self.memory.size_bytes
        return sum(address < end for address in self.driver.mappings)

    @rule(num_tokens=st.integers(1, 32))
    def open_range(self, num_tokens: int) -> None:
        if self.kv.can_fit(num_tokens):
            self.written[self.kv.open(num_tokens).index] = b""

    @precondition(lambda self: self.written)
    @rule(data=st.data(), num_tokens=st.integers(1, 32))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.written)))
        self.kv.grow(self.kv.ranges[index], num_tokens, len(self.written[index]))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.written)))
        self.kv.close(self.kv.ranges[index])
        del self.written[index]

    @rule(num_tokens=st.integers(1, 12), fails=st.booleans())
    def map_ahead(self, num_tokens: int, fails: bool) -> None:
        """Waits until the thread has finished, so that failures are reproducible."""
        if fails:
            self.driver.fail("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        ranges = [self.kv.ranges[index] for index in self.written]
        self.kv.map_ahead([(item, item.capacity + num_tokens) for item in ranges])
        while self.kv.space.is_busy:
            time.sleep(1e-4)
        self.driver.fail_no_more()

    @rule(first=st.integers(0, 11), length=st.integers(1, 12), limit=st.integers(0, 12))
    def prepare(self, first: int, length: int, limit: int) -> None:
        self.driver.memory_bytes = max(limit * PAGE, self.driver.used_bytes)
        with contextlib.suppress(CudaError):
            self.memory.prepare(first, min(length, 12 - first))
        self.driver.memory_bytes = 12 * PAGE

    @rule()
    def commit(self) -> None:
        """Every granted position can be written by a kernel that runs late."""
        self.kv.commit()
        for index, written in self.written.items():
            item = self.kv.ranges[index]
            for position in range(len(written), item.capacity):
                self.next_byte = (self.next_byte + 1) % 251
                token = bytes([self.next_byte]) * self.TOKEN
                self.driver.launch(self.address(item, position), token)
                written += token[:1]
            self.written[index] = written

    @rule(
        call=st.sampled_from(["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"]),
        after=st.integers(0, 4),
        error=st.sampled_from([CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_UNKNOWN]),
    )
    def commit_with_a_failure(self, call: str, after: int, error: CUresult) -> None:
        self.driver.fail(call, error, after)
        with contextlib.suppress(CudaError):
            self.kv.commit()
        self.driver.fail_no_more()

    @precondition(lambda self: self.visible)
    @rule(
        data=st.data(),
        call=st.sampled_from(["", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"]),
        after=st.integers(0, 4),
    )
    def read_by_page_address(self, data: st.DataObject, call: str, after: int) -> None:
        item = data.draw(st.sampled_from(self.visible))
        part = item.parts[0]
        slot = data.draw(st.integers(part.num_released, part.num_mapped - 1))
        if call:
            self.driver.fail(call, CUresult.CUDA_ERROR_UNKNOWN, after)
        address = 0
        with contextlib.suppress(CudaError):
            address = self.memory.page_address(part.pages[slot])
        self.driver.fail_no_more()
        if address:
            self.driver.cuCtxSynchronize()
            mapped = self.address(item, slot * PAGE // self.TOKEN)
            assert self.driver.read(address, PAGE) == self.driver.read(mapped, PAGE)

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        assert self.kv.num_mapped == self.kv.num_in_use
        assert self.num_in_ranges == sum(
            item.parts[0].num_mapped - item.parts[0].num_released for item in self.kv.ranges
        )

    @invariant()
    def consistent(self) -> None:
        self.kv.check_integrity()
        assert self.driver.used_bytes == len(self.driver.handles) * PAGE

    @rule()
    def read_everything(self) -> None:
        self.driver.cuCtxSynchronize()
        for index, written in self.written.items():
            first = 0 if self.WINDOW is None else max(0, len(written) + 1 - self.WINDOW)
            for position, byte in enumerate(written[first:], first):
                address = self.address(self.kv.ranges[index], position)
                assert self.driver.read(address, self.TOKEN) == bytes([byte]) * self.TOKEN

    def teardown(self) -> None:
        self.read_everything()
        for index in self.written:
            self.kv.close(self.kv.ranges[index])
        self.kv.close_all()
        assert self.num_in_ranges == 0
        self.memory.close()
        assert self.driver.num_live == (0, 0, 0, 0)
        assert self.driver.used_bytes == 0


class WindowMachine(DeviceKVMachine):
    """Pages behind a sliding window are released too."""

    WINDOW = 6


class AheadMachine(DeviceKVMachine):
    """A thread prepares pages ahead of need."""

    IN_BACKGROUND = True


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = examples(200, steps=40)
TestDeviceKVMachine = DeviceKVMachine.TestCase
TestDeviceKVMachine.settings = examples(200, steps=40)
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = examples(60, steps=40)


@pytest.mark.parametrize("fails", [False, True])
def test_preparing_ahead_changes_no_mapping(fails, caplog):
    """A range still maps pages of its previous sequence that belong to another one by now.
    Preparing its next pages leaves these mappings until the step boundary, whether it succeeds
    or not."""
    driver = FakeDriver(granularity=PAGE)
    memory = CudaMemory(PAGE, 8, driver=driver)
    kv = KVManager(memory, num_pages=8, num_ranges=2, max_model_len=32, token_bytes=1024)
    memory.reserve(kv.total_bytes)
    first = kv.open(16)
    assert kv.grow(first, 16)
    kv.commit()
    kv.close(first)
    again, other = kv.open(4), kv.open(12)
    assert again is first and kv.grow(again, 4) and kv.grow(other, 12)
    kv.commit()
    mapped = list(kv.space.mapped(again.index))
    assert len(mapped) == 4 and set(mapped) & set(other.pages), (
        "stale pages belong to another sequence"
    )
    if fails:
        driver.fail("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    num_created = driver.calls["cuMemCreate"]
    kv.map_ahead([(again, 16)])
    while kv.space.is_busy:
        time.sleep(1e-3)
    kv.space.collect()
    assert driver.calls["cuMemCreate"] > num_created
    assert ("mapping ahead failed" in caplog.text) == fails
    assert kv.space.mapped(again.index) == mapped and len(driver.mappings) == 4 + 3
    driver.fail_no_more()
    kv.trim()
    assert len(driver.mappings) == 1 + 3, "mappings that no sequence needs are unmapped"
    assert len(driver.handles) == kv.num_in_use == 4
    kv.close_all()
    memory.close()
