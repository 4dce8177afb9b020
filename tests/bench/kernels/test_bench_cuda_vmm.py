"""The script for a real device runs on a fake driver, and exits with a message without one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from bench.kernels.cuda_vmm import check, run
from tests.support.cuda.fakes_cuda import CUresult, FakeDriver

PAGE = 4096


def make_driver() -> FakeDriver:
    return FakeDriver(granularity=PAGE, memory_bytes=256 * PAGE)


def test_the_report(capsys):
    driver = make_driver()
    assert run(driver, PAGE, repeats=3)
    *_, header, one, eight, many, line = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["pages", "Create", "Map", "SetAccess", "Unmap", "Release"]
    assert [row.split()[0] for row in (one, eight, many)] == ["1", "8", "64"]
    result = json.loads(line)
    assert all(result["checks"].values())
    assert all(row["map_us"] > row["cuMemSetAccess"] > 0 for row in result["us"])
    assert all(row["own_us_per_page"] > 0 for row in result["us"])
    assert driver.num_live == (0, 0, 0, 0)


class CopyingDriver(FakeDriver):
    """A driver whose mappings have bytes of their own, so that aliases do not work."""

    def cuMemMap(self, address, size, offset, handle, flags):
        result = super().cuMemMap(address, size, offset, handle, flags)
        mapping = self.mappings[address]
        mapping.allocation = dataclasses.replace(mapping.allocation, data=bytearray(size))
        return result


def test_a_driver_that_behaves_otherwise_is_found_out(capsys):
    found = check(CopyingDriver(granularity=PAGE, memory_bytes=256 * PAGE), 2 * PAGE)
    assert not found["an alias shows what was written"]
    assert not found["a page's own address shows it"]
    assert not found["a page keeps its content while it is mapped nowhere"]
    assert found["a mapping can be replaced"]
    driver = make_driver()
    driver.fail("cuMemUnmap", CUresult.CUDA_ERROR_UNKNOWN, after=5)
    assert not run(driver, PAGE, repeats=1)
    assert "NO   adjacent mappings are unmapped in one call" in capsys.readouterr().out


def test_no_bindings_are_one_line():
    """The test hides bindings that are installed."""
    code = (
        "import sys; sys.modules['cuda.bindings.driver'] = None\n"
        "import bench.kernels.cuda_vmm; sys.argv = ['cuda_vmm']; bench.kernels.cuda_vmm.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("no bindings of the CUDA driver here (")
    assert line.endswith("; pip install '.[cuda]'")
