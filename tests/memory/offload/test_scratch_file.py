"""The file of units: transfers of many units, its space, and that it ends with its process."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from memory.offload import scratch_file
from memory.offload.scratch_file import checksums, open_file
from memory.tiers.direct_io import address_of

BLOCK = 4096
UNIT = 3 * BLOCK
NUM = 200  # more than a ring takes at once


@pytest.fixture(params=["io_uring", "threads"])
def file(request, tmp_path, monkeypatch):
    if request.param == "threads":
        monkeypatch.setattr(scratch_file, "choose_io", lambda directory: "threads")
    opened = open_file(tmp_path, NUM * UNIT)
    if opened.io != request.param:
        pytest.skip("no io_uring here")
    yield opened
    opened.close()


@pytest.fixture
def memory():
    with mmap.mmap(-1, 2 * NUM * UNIT) as made:
        made[: NUM * UNIT] = os.urandom(NUM * UNIT)
        yield made


def test_many_units_in_one_call(file, memory):
    lane, base = file.lane(), address_of(memory)
    order = np.random.default_rng(1).permutation(NUM)
    sources = base + order * UNIT
    written = lane.write(sources, np.arange(NUM) * UNIT, UNIT)
    targets = base + NUM * UNIT + order * UNIT
    read = lane.read(targets, np.arange(NUM) * UNIT, UNIT)
    assert memory[: NUM * UNIT] == memory[NUM * UNIT :]
    assert (read == written).all() and (read == checksums(sources, UNIT)).all()
    assert len(set(read.tolist())) == NUM


def test_a_failure_ends_the_call_and_no_other_one(file, memory):
    lane, base = file.lane(), address_of(memory)
    places = np.arange(NUM) * UNIT
    beyond = places.copy()
    beyond[NUM // 2] = NUM * UNIT  # where the file has ended
    with pytest.raises(OSError, match="Errno 5"):
        lane.read(base + places, beyond, UNIT)
    across = places.copy()
    across[-1] += BLOCK
    with pytest.raises(OSError, match="Errno 5"):  # the last block of a unit is missing
        lane.read(base + places, across, UNIT)
    sums = lane.write(base + places, places, UNIT)
    assert (lane.read(base + NUM * UNIT + places, places, UNIT) == sums).all()


def test_an_address_without_memory(file):
    lane = file.lane()
    with mmap.mmap(-1, UNIT) as memory:
        address = address_of(memory)
    with pytest.raises(OSError, match="Bad address"):
        lane.read(np.array([address]), np.array([0]), UNIT)


def test_a_file_has_its_space_and_no_name(tmp_path):
    file = open_file(tmp_path, 2**20)
    status = os.fstat(file.fileno())
    assert status.st_nlink == 0 and status.st_blocks * 512 >= 2**20
    assert not list(tmp_path.iterdir())
    file.close()


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    real = scratch_file.open_direct

    def refuse(path, flags):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        return real(path, flags)

    monkeypatch.setattr(scratch_file, "open_direct", refuse)
    file = open_file(tmp_path, 2**20)
    assert os.fstat(file.fileno()).st_nlink == 0
    assert not list(tmp_path.iterdir())
    file.close()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs there")
def test_a_file_system_in_memory_is_named(caplog):
    open_file("/dev/shm", BLOCK).close()
    assert "/dev/shm is no disk: its files take memory" in caplog.text


def test_more_than_the_disk_has(tmp_path):
    status = os.statvfs(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        open_file(tmp_path, 2 * status.f_bavail * status.f_frsize)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing", 2**20)


CHILD = """
import sys, time
from memory.offload.scratch_file import open_file
file = open_file(sys.argv[1], 2**26)
print("opened", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_killed_process(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "opened\n"
        assert any(is_deleted_in(child.pid, fd, tmp_path) for fd in open_files(child.pid))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert not list(tmp_path.iterdir())


def open_files(pid):
    return os.listdir(f"/proc/{pid}/fd")


def is_deleted_in(pid, fd, directory):
    """Returns whether it is a file of the directory without a name."""
    target = os.readlink(f"/proc/{pid}/fd/{fd}")
    return target.startswith(str(directory)) and target.endswith("(deleted)")
