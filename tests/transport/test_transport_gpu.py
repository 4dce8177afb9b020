"""transport/gpu.py on a fake GPU and a fake mlx5 device
(tests/support/cuda/fakes_gpu_rdma.py)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.support.cuda.fakes_gpu_rdma import (
    DEVICE,
    DEVICE_BASE,
    PAGE,
    CUresult,
    FakeDriver,
    FakeNic,
    context,
)
from transport import gpu as module
from transport.base import TransportError
from transport.gpu import (
    DeviceRegion,
    Gpu,
    GpuUnavailableError,
    HostWord,
    SendQueue,
    Source,
    StreamReceiver,
    StreamSender,
    Target,
    send_queue_of,
)

STREAM = object()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def gpu(driver) -> Gpu:
    return Gpu(driver, DEVICE)


# ---- registration


class Registered:
    """Stands in for MREx and DmaBufMR, and records its arguments."""

    rkey, lkey = 0xA1, 0xA2

    def __init__(self, domain, num_bytes, access, **settings) -> None:
        fd = settings.get("fd", settings.get("dmabuf"))
        os.fstat(fd)  # the descriptor is still open
        self.num_bytes, self.access, self.settings = num_bytes, access, settings
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class VerbsError(Exception):
    pass


@pytest.fixture
def verbs(monkeypatch) -> SimpleNamespace:
    mr = SimpleNamespace(MREx=Registered, DmaBufMR=Registered)
    modules = {"mr": mr, "pyverbs_error": SimpleNamespace(PyverbsError=VerbsError)}
    monkeypatch.setattr(module, "pyverbs", modules.__getitem__)
    numbers = SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_WRITE=2)
    monkeypatch.setattr(module, "constants", lambda: numbers)
    return mr


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_device_memory_is_registered_under_its_own_addresses(gpu, driver, verbs):
    region = DeviceRegion(gpu, "domain", DEVICE_BASE + PAGE, 2 * PAGE)
    made = region._region
    assert made.settings == {"fd": driver.fds[0], "iova": DEVICE_BASE + PAGE}
    assert (made.num_bytes, made.access) == (2 * PAGE, 3)
    assert (region.key, region.local_key) == (0xA1, 0xA2)
    assert region.address_of(DEVICE_BASE + PAGE + 5) == DEVICE_BASE + PAGE + 5
    assert not is_open(driver.fds[0])
    region.close()
    assert made.is_closed
    assert DeviceRegion(gpu, "domain", DEVICE_BASE, PAGE, for_peer=False)._region.access == 1


def test_device_memory_is_registered_under_offsets_otherwise(gpu, driver, verbs):
    del verbs.MREx
    region = DeviceRegion(gpu, "domain", DEVICE_BASE + PAGE, 2 * PAGE)
    assert region._region.settings == {"dmabuf": driver.fds[0], "offset": 0}
    assert region.address_of(DEVICE_BASE + PAGE + 5) == 5
    for outside in (DEVICE_BASE + PAGE - 1, DEVICE_BASE + 3 * PAGE):
        with pytest.raises(ValueError, match="not in the region"):
            region.address_of(outside)


def test_only_whole_pages_are_registered(gpu, verbs):
    for address, num_bytes in [(DEVICE_BASE + 64, PAGE), (DEVICE_BASE, 100), (DEVICE_BASE, 0)]:
        with pytest.raises(ValueError, match="whole pages"):
            DeviceRegion(gpu, "domain", address, num_bytes)


def test_reasons_why_device_memory_is_not_registered(gpu, driver, verbs):
    with pytest.raises(TransportError, match="cuMemGetHandleForAddressRange: CUDA_ERROR_INVALID"):
        DeviceRegion(gpu, "domain", DEVICE_BASE, 64 * PAGE)

    def refuse(*_, **__):
        raise VerbsError("not supported")

    verbs.MREx = refuse
    with pytest.raises(GpuUnavailableError, match="not registered: not supported"):
        DeviceRegion(gpu, "domain", DEVICE_BASE, PAGE)
    assert driver.fds and not any(is_open(fd) for fd in driver.fds)
    driver.lacks.add("DMA_BUF_SUPPORTED")
    with pytest.raises(GpuUnavailableError, match="DMA_BUF_SUPPORTED"):
        DeviceRegion(gpu, "domain", DEVICE_BASE, PAGE)


# ---- receiving


@pytest.mark.parametrize("lacks", [set(), {"CAN_USE_64_BIT_STREAM_MEM_OPS"}])
def test_a_stream_waits_for_a_message_number(gpu, driver, lacks):
    driver.lacks = lacks
    receiver = StreamReceiver(gpu, is_device_memory=True)
    seen = []
    for number in (1, 2, (1 << 32) + 3):
        receiver.wait(STREAM, DEVICE_BASE + 64, number)
        driver.enqueue(lambda number=number: seen.append(number))
    driver.run()
    assert seen == []
    driver.write(DEVICE_BASE + 64, (2).to_bytes(8, "little"))
    driver.run()
    assert seen == [1, 2]
    assert driver.num_flushes == 2
    driver.write(DEVICE_BASE + 64, ((1 << 32) + 3).to_bytes(8, "little"))
    driver.run()
    assert seen == [1, 2, (1 << 32) + 3]


def test_device_memory_needs_a_flush_and_host_memory_does_not(gpu, driver):
    driver.lacks.add("CAN_FLUSH_REMOTE_WRITES")
    with pytest.raises(GpuUnavailableError, match="CAN_FLUSH_REMOTE_WRITES"):
        StreamReceiver(gpu, is_device_memory=True)
    driver.writes_ordering = 100  # the GPU itself sees writes in order
    for receiver in [StreamReceiver(gpu, is_device_memory=x) for x in (False, True)]:
        receiver.wait(STREAM, DEVICE_BASE, 0)
        driver.run()
        assert not driver.queue and driver.num_flushes == 0


def test_a_stream_and_the_host_exchange_numbers(gpu, driver):
    to_host, to_stream = HostWord(gpu), HostWord(gpu)
    receiver = StreamReceiver(gpu, is_device_memory=False)
    for number in (1, 2):
        receiver.wait(STREAM, to_stream.device_address, number)
        to_host.write(STREAM, number)
        driver.run()
        assert to_host.value == number - 1
        to_stream.value = number
        driver.run()
        assert to_host.value == number
    for word in (to_host, to_stream):
        word.close()
    assert driver.registered == {}


def test_a_word_that_is_not_mapped_is_unregistered(gpu, driver, monkeypatch):
    refused = (CUresult.CUDA_ERROR_INVALID_VALUE, 0)
    monkeypatch.setattr(driver, "cuMemHostGetDevicePointer", lambda *_: refused)
    with pytest.raises(TransportError, match="cuMemHostGetDevicePointer"):
        HostWord(gpu)
    assert driver.registered == {}


# ---- sending


@pytest.fixture
def nic(driver) -> FakeNic:
    nic = FakeNic(num_blocks=8)
    nic.peer[0xBEEF] = bytearray(4 * PAGE)
    nic.read_local[0xA2] = driver.read
    driver.nic = nic
    return nic


PAIR = SimpleNamespace(qp=0xC0FFEE, qp_num=FakeNic.NUMBER)


def queue_of(nic) -> SendQueue:
    return send_queue_of(context(), PAIR, SimpleNamespace(mlx5dv_init_obj=nic.direct))


def send(sender, number: int, num_bytes: int = 100, **more) -> None:
    source = Source(0xA2, DEVICE_BASE + 32 * number, num_bytes)
    sender.send(STREAM, source, Target(0xBEEF, 512 * number, 8), number, **more)


def test_the_send_queue_is_found(nic):
    assert queue_of(nic) == SendQueue(
        queue_pair=nic.NUMBER,
        blocks=nic.blocks.address,
        num_blocks=8,
        record=nic.records.address + 68,
        register=nic.register.address + nic.AT,
        other_register=nic.BUFFER_BYTES,
    )


def test_a_message_leaves_when_the_stream_reaches_it(gpu, driver, nic):
    sender = StreamSender(gpu, queue_of(nic))
    gate = StreamReceiver(gpu, is_device_memory=False)
    gate.wait(STREAM, DEVICE_BASE, 1)
    driver.enqueue(lambda: driver.write(DEVICE_BASE + 32, b"made by a kernel"))
    send(sender, 1, 16, reports=True)
    driver.run()
    peer = nic.peer[0xBEEF]
    assert nic.num_done == 0
    driver.write(DEVICE_BASE, (1).to_bytes(8, "little"))
    driver.run()
    assert peer[512:528] == b"made by a kernel"
    assert int.from_bytes(peer[8:16], "little") == 1
    assert (nic.num_done, nic.num_completions) == (2, 1)
    sender.close()
    assert driver.registered == {}


def test_laps_of_the_send_queue_and_of_its_counter(gpu, driver, nic):
    sender = StreamSender(gpu, queue_of(nic))
    peer = nic.peer[0xBEEF]
    for number in range(1, 40_000):  # the counter has 16 bits
        slot, data = number % 7, number.to_bytes(4, "little")
        driver.write(DEVICE_BASE + 32 * slot, data)
        source = Source(0xA2, DEVICE_BASE + 32 * slot, 4)
        sender.send(STREAM, source, Target(0xBEEF, 512 * slot + 16, 8), number)
        driver.run()
        assert peer[512 * slot + 16 : 512 * slot + 20] == data
        assert int.from_bytes(peer[8:16], "little") == number
        sender.done(1)


def test_a_full_send_queue(gpu, driver, nic):
    sender = StreamSender(gpu, queue_of(nic))
    for number in range(1, 5):
        send(sender, number)
    with pytest.raises(TransportError, match="full"):
        send(sender, 5)
    driver.run()
    sender.done(2)
    send(sender, 5)
    driver.run()
    assert nic.num_done == 10


def test_payloads_of_0_bytes_and_of_2_gib_are_refused(gpu, nic):
    sender = StreamSender(gpu, queue_of(nic))
    for num_bytes in (0, 1 << 31):
        with pytest.raises(ValueError, match="payload"):
            send(sender, 1, num_bytes)


def test_reasons_why_there_is_no_send_queue(nic):
    library = SimpleNamespace(mlx5dv_init_obj=nic.direct)
    with pytest.raises(GpuUnavailableError, match="mlx5"):
        send_queue_of(context(vendor=0xFFFFFF), PAIR, library)
    with pytest.raises(GpuUnavailableError, match="pyverbs"):
        send_queue_of(context(), SimpleNamespace(qp_num=1), library)
    with pytest.raises(GpuUnavailableError, match="refused"):
        send_queue_of(context(), SimpleNamespace(qp=1, qp_num=1), library)


def test_reasons_why_a_stream_cannot_send(gpu, driver, nic):
    driver.is_peer_mapping_allowed = False
    with pytest.raises(GpuUnavailableError, match="doorbell: cuMemHostRegister"):
        StreamSender(gpu, queue_of(nic))
    assert driver.registered == {}
    driver.lacks.add("CAN_USE_64_BIT_STREAM_MEM_OPS")
    with pytest.raises(GpuUnavailableError, match="64_BIT"):
        StreamSender(gpu, queue_of(nic))
