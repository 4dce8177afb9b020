"""A KV manager on device memory, in any order of operations, with a driver that fails at times."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory.cuda_device import CudaError
from memory.cuda_vmm import CudaMemory
from memory.kv_manager import KVManager, Range
from tests.fakes_cuda import CUresult, FakeDriver

PAGE = 4096


class DeviceKVMachine(RuleBasedStateMachine):
    """No sequence ever loses a token, and nothing is left at the end."""

    TOKEN = 1024

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver(granularity=PAGE)
        self.memory = CudaMemory(PAGE, 12, driver=self.driver)
        self.kv = KVManager(
            self.memory,
            num_pages=12,
            num_ranges=4,
            max_model_len=32,
            token_bytes=self.TOKEN,
            in_background=False,  # failures come at places that can be repeated
        )
        self.base = self.memory.reserve(self.kv.total_bytes)
        self.written: dict[int, bytes] = {}  # one byte for each token, by range
        self.next_byte = 0

    def address(self, item: Range, position: int) -> int:
        return self.base + (self.kv.start_of(item.index) + position) * self.TOKEN

    @property
    def num_in_ranges(self) -> int:
        """Mappings, without the pages' own places behind the reservation's end."""
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
        self.kv.grow(self.kv.ranges[index], num_tokens)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.written)))
        self.kv.close(self.kv.ranges[index])
        del self.written[index]

    @rule(first=st.integers(0, 11), length=st.integers(1, 12), limit=st.integers(0, 12))
    def prepare(self, first: int, length: int, limit: int) -> None:
        self.driver.memory_bytes = max(limit * PAGE, self.driver.used_bytes)
        with contextlib.suppress(CudaError):
            self.memory.prepare(first, min(length, 12 - first))
        self.driver.memory_bytes = 12 * PAGE

    @rule()
    def commit(self) -> None:
        """Everything granted can be written, by a kernel that runs late."""
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

    @precondition(lambda self: any(item.valid for item in self.kv.ranges))
    @rule(
        data=st.data(),
        call=st.sampled_from(["", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"]),
        after=st.integers(0, 4),
    )
    def look_by_its_own_address(self, data: st.DataObject, call: str, after: int) -> None:
        item = data.draw(st.sampled_from([item for item in self.kv.ranges if item.valid]))
        place = data.draw(st.integers(0, item.valid - 1))
        if call:
            self.driver.fail(call, CUresult.CUDA_ERROR_UNKNOWN, after)
        address = 0
        with contextlib.suppress(CudaError):
            address = self.memory.page_address(item.pages[place])
        self.driver.fail_no_more()
        if address:
            self.driver.cuCtxSynchronize()
            shown = self.address(item, place * PAGE // self.TOKEN)
            assert self.driver.read(address, PAGE) == self.driver.read(shown, PAGE)

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        assert self.kv.num_mapped == self.kv.num_in_use
        assert self.num_in_ranges == sum(item.valid for item in self.kv.ranges)

    @invariant()
    def consistent(self) -> None:
        self.kv.check_integrity()
        assert self.driver.used_bytes == len(self.driver.handles) * PAGE

    @rule()
    def read_everything(self) -> None:
        self.driver.cuCtxSynchronize()
        for index, written in self.written.items():
            for position, byte in enumerate(written):
                address = self.address(self.kv.ranges[index], position)
                assert self.driver.read(address, self.TOKEN) == bytes([byte]) * self.TOKEN

    def teardown(self) -> None:
        self.read_everything()
        for index in self.written:
            self.kv.close(self.kv.ranges[index])
        self.kv.trim()
        assert self.num_in_ranges == 0
        self.memory.close()
        assert self.driver.num_live == (0, 0, 0, 0)
        assert self.driver.used_bytes == 0


TestDeviceKVMachine = DeviceKVMachine.TestCase
TestDeviceKVMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
