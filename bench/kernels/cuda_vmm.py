"""Checks and times the CUDA driver's virtual memory: python -m bench.kernels.cuda_vmm.

It first checks the properties of the driver that memory/pages/cuda_vmm.py needs and that
tests/support/cuda/fakes_cuda.py has. For example, aliases show the same bytes, a partial mapping is
undone when memory runs out (the check lets it run out), and no memory is left at the end. Then it
times the calls for 2 MiB pages, one page and several pages to a call. It needs a CUDA driver and
`mergestep[cuda]`.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from memory.pages.cuda_device import CudaError, CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory

_PAGE = 2 << 20
_RUNS = (1, 8, 64)  # pages of one cuMemSetAccess and one cuMemUnmap
_TIMED = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")


class TimedDriver:
    """A driver that notes the seconds of every call of _TIMED, by name."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.seconds: dict[str, list[float]] = {name: [] for name in _TIMED}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if name not in _TIMED:
            return found

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = found(*arguments)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        return timed


class Probe:
    """Reads and writes device memory in a thread that has a CUDA context."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Returns the values of a driver call. Raises CudaError if it fails."""
        result: tuple[Any, ...] = getattr(self._driver, name)(*arguments)
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(errno.EIO, f"{name}: {error.name}")
        return values

    def fill(self, address: int, value: int, size: int) -> None:
        self.call("cuMemsetD8", address, value, size)

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH", ctypes.addressof(data), address, size)
        return data.raw

    def num_free_bytes(self) -> int:
        return int(self.call("cuMemGetInfo")[0])


def fails(action: Callable[..., object], *arguments: Any) -> bool:
    try:
        action(*arguments)
    except CudaError:
        return True
    return False


def check(driver: Any, page: int) -> dict[str, bool]:
    """Returns, by property, whether this driver has it. page: bytes, twice the granularity or
    more."""
    memory = CudaMemory(page, 8, driver=driver)
    probe = Probe(driver)
    base = memory.reserve(16 * page)
    found = _check_content(memory, probe, base)
    found |= _check_edits(memory, probe, base)
    found |= _check_out_of_memory(driver, probe, page)
    found["everything can be closed"] = not fails(memory.close)
    return found


def _check_content(memory: CudaMemory, probe: Probe, base: int) -> dict[str, bool]:
    page = memory.page_bytes
    memory.prepare(0, 4)
    memory.map(0, 0, 2)
    probe.fill(base + page - 8, 7, 16)  # across the border of two pages
    memory.map(4 * page, 1, 1)
    alias = probe.read(base + 4 * page, 8)
    probe.fill(base + 4 * page, 9, 8)
    back = probe.read(base + page, 8)
    own = probe.read(memory.page_address(1), 8)
    memory.unmap(0, 2)
    memory.map(8 * page, 0, 1)
    kept = probe.read(base + 9 * page - 8, 8)
    memory.unmap(0, 16)
    return {
        "an alias shows what was written": alias == bytes([7]) * 8,
        "what is written through an alias is seen": back == bytes([9]) * 8,
        "a page's own address shows it": own == bytes([9]) * 8,
        "a page keeps its content while it is mapped nowhere": kept == bytes([7]) * 8,
    }


def _check_edits(memory: CudaMemory, probe: Probe, base: int) -> dict[str, bool]:
    page = memory.page_bytes
    memory.map(0, 0, 4)
    memory.map(4 * page, 4, 2)
    found = {
        "an unmapped address is refused": fails(probe.read, base + 6 * page, 1),
        "a part of a mapping cannot be unmapped": fails(probe.call, "cuMemUnmap", base, page // 2),
    }
    memory.map(2 * page, 6, 1)
    found["a mapping can be replaced"] = not fails(probe.fill, base, 1, 6 * page)
    found["adjacent mappings are unmapped in one call"] = not fails(memory.unmap, 0, 6)
    return found


def _check_out_of_memory(driver: Any, probe: Probe, page: int) -> dict[str, bool]:
    """Maps pages of a quarter of the device's memory, of which the fifth cannot fit."""
    free, total = probe.call("cuMemGetInfo")
    memory = CudaMemory(total // 4 // page * page, 6, driver=driver)
    large = memory.page_bytes
    base = memory.reserve(6 * large)
    memory.map(5 * large, 5, 1)
    number = 0
    try:
        memory.map(0, 0, 5)
    except CudaError as error:
        number = error.errno or 0
    is_unwound = fails(probe.read, base, 1) and not fails(probe.read, base + 5 * large, 1)
    memory.release(0, 5)
    can_go_on = not fails(memory.map, 0, 0, 1) and not fails(probe.fill, base, 1, page)
    memory.close()
    return {
        "memory that runs out is ENOMEM": number == errno.ENOMEM,
        "then the partial mapping is gone, and no other": is_unwound,
        "after a release there is memory again": can_go_on,
        # The driver may keep some memory for itself, but less than one page.
        "memory is given back": probe.num_free_bytes() > free - large // 2,
    }


def measure(driver: Any, page: int, repeats: int) -> list[dict[str, float]]:
    """Returns the median microseconds of each call and of `map` as a whole, for runs of 1, 8 and 64
    pages. Create, map and release are calls for one page, set access and unmap for a whole run.
    """
    rows = []
    for length in _RUNS:
        timed = TimedDriver(driver)
        memory = CudaMemory(page, length, driver=timed)
        memory.reserve(length * page)
        whole = []
        for _ in range(repeats):
            memory.prepare(0, length)
            began = time.perf_counter()
            memory.map(0, 0, length)
            whole.append(time.perf_counter() - began)
            memory.unmap(0, length)
            memory.release(0, length)
        memory.close()
        row = {name: 1e6 * statistics.median(timed.seconds[name]) for name in _TIMED}
        map_us = 1e6 * statistics.median(whole)
        row |= {"pages": length, "map_us": map_us, "map_us_per_page": map_us / length}
        row["own_us_per_page"] = _own_us(driver, page, length, repeats) / length
        rows.append(row)
    return rows


def _own_us(driver: Any, page: int, length: int, repeats: int) -> float:
    """Returns the median microseconds in which pages that exist get addresses of their own."""
    memory = CudaMemory(page, length, driver=driver)
    memory.reserve(page)
    seconds = []
    for _ in range(repeats):
        memory.prepare(0, length)
        began = time.perf_counter()
        for number in range(length):
            memory.page_address(number)
        seconds.append(time.perf_counter() - began)
        memory.release(0, length)
    memory.close()
    return 1e6 * statistics.median(seconds)


def run(driver: Any, page: int, repeats: int) -> bool:
    """Prints the report, whose last line is JSON. Returns whether every check held."""
    holds = check(driver, 2 * page)
    probe = Probe(driver)
    name = probe.call("cuDeviceGetName", 100, 0)[0].split(b"\0")[0].decode()
    print(f"{name}, driver {probe.call('cuDriverGetVersion')[0]}, pages of {page >> 10} KiB")
    for what, is_so in holds.items():
        print(f"  {'yes' if is_so else 'NO ':3}  {what}")
    rows = measure(driver, page, repeats)
    print(f"\nmicroseconds, median of {repeats}, handles made ahead")
    calls = "".join(f"{call[5:]:>11}" for call in _TIMED)
    print(f"{'pages':>6}{calls}  map() a page  own address")
    for row in rows:
        cells = "".join(f"{row[call]:11.1f}" for call in _TIMED)
        print(
            f"{row['pages']:6}{cells}{row['map_us']:7.1f} {row['map_us_per_page']:6.1f}"
            f"{row['own_us_per_page']:13.1f}"
        )
    print(json.dumps({"device": name, "page_bytes": page, "checks": holds, "us": rows}))
    return all(holds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        sys.exit(f"no bindings of the CUDA driver here ({error}); pip install '.[cuda]'")
    try:
        CudaMemory(_PAGE, 1, driver=driver).close()
    except CudaUnavailableError as error:
        sys.exit(f"no CUDA driver here: {error}")
    sys.exit(0 if run(driver, _PAGE, args.repeats) else 1)


if __name__ == "__main__":
    main()
