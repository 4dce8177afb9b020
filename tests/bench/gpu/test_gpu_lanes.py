"""The section on lanes of the GPU report, on a fake driver whose streams are threads."""

from __future__ import annotations

import contextlib
import struct
import threading
import time

import pytest

from bench.gpu import lanes
from bench.gpu.record import Record
from tests.support.cuda.fakes_gpu_rdma import DEVICE, DEVICE_BASE, CUresult, FakeDriver
from transport.gpu import Gpu

STREAM, RELEASE_STREAM = object(), object()


class TwoStreams(FakeDriver):
    """The driver's queue is that of STREAM. The other stream waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_release_lost = False

    def cuStreamWriteValue64(self, stream, address: int, value: int, flags: int):
        if stream is STREAM:
            return super().cuStreamWriteValue64(stream, address, value, flags)
        if not self.is_release_lost:
            self.write(address, struct.pack("<Q", value))
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):
        deadline = time.monotonic() + 10
        while self.queue and stream is STREAM:
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        return super().cuStreamSynchronize(stream)


@contextlib.contextmanager
def running(driver: FakeDriver):
    """Lets the stream run in a thread."""
    is_over = threading.Event()

    def go() -> None:
        while not is_over.wait(1e-5):
            driver.run()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measured(driver: TwoStreams, tmp_path) -> Record:
    record = Record(tmp_path / "record.json")
    with running(driver):  # a number changes hands with the interpreter's lock
        lanes.measure(record, Gpu(driver, DEVICE), STREAM, RELEASE_STREAM, DEVICE_BASE, scale=20)
    return record


def test_round_trips_and_releases(tmp_path):
    driver = TwoStreams()
    record = measured(driver, tmp_path)
    assert record.errors == {}
    support, trips, releases = record.cases.values()
    assert support == {
        "dma_buf": True, "64_bit_stream_ops": True, "flush": True, "order": 0, "lanes": True,
    }  # fmt: skip
    assert (trips["count"], releases["count"]) == (102, 1)
    for case in (trips, releases):
        assert 0 < case["seconds"] <= case["p99_s"] < 5
    assert not driver.queue and not driver.registered


def test_a_device_that_lacks_something(tmp_path):
    driver = TwoStreams()
    for lacks, order, wanted in (
        ({"DMA_BUF_SUPPORTED"}, 100, False),
        ({"CAN_FLUSH_REMOTE_WRITES"}, 0, False),
        ({"CAN_FLUSH_REMOTE_WRITES"}, 100, True),
    ):
        driver.lacks, driver.writes_ordering = lacks, order
        assert lanes._support(Gpu(driver, DEVICE), DEVICE_BASE)["lanes"] is wanted
    driver.lacks = {"CAN_USE_64_BIT_STREAM_MEM_OPS"}
    record = Record(tmp_path / "other.json")
    lanes.measure(record, Gpu(driver, DEVICE), STREAM, RELEASE_STREAM, DEVICE_BASE)
    assert record.errors == {} and list(record.cases) == ["support"]
    assert record.cases["support"]["lanes"] is False


def test_a_stream_that_does_not_go_on_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "_PATIENCE_S", 0.5)
    driver = TwoStreams()
    driver.is_release_lost = True
    record = measured(driver, tmp_path)
    assert "TimeoutError" in record.errors["release of a stream that waits"]
    assert list(record.cases) == ["support", "round trip with the host"]


def test_without_a_gpu_the_section_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes.torch.cuda, "is_available", lambda: False)
    record = Record(tmp_path / "record.json", is_dry=True)
    lanes.run(record)
    assert record.cases == {"skipped": {"reason": "there is no GPU"}}


@pytest.mark.parametrize("times", [[3.0, 1.0, 2.0]])
def test_figures(times):
    assert lanes._figures(times) == {"seconds": 2.0, "p99_s": 3.0, "count": 3}
