"""Copies in chunks through pinned memory, on a device whose copies end late."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ops.cuda import upload
from ops.cuda.upload import Uploader, on_device

CPU = torch.device("cpu")


class LateEvent:
    """An event of the device's work, which ends a millisecond after `synchronize` was called."""

    def __init__(self) -> None:
        self.is_pending = False
        self.num_recorded = 0

    def record(self) -> None:
        assert not self.is_pending, "the buffer's last copy was not waited for"
        self.is_pending = True
        self.num_recorded += 1

    def synchronize(self) -> None:
        if self.is_pending:
            time.sleep(1e-3)
        self.is_pending = False


class Rig:
    def __init__(self, chunk_bytes: int) -> None:
        self.events: list[LateEvent] = []
        self.uploader = Uploader(
            CPU,
            chunk_bytes=chunk_bytes,
            make_buffer=lambda size: torch.full((size,), 77, dtype=torch.uint8),
            make_event=self._event,
        )

    def _event(self) -> LateEvent:
        self.events.append(LateEvent())
        return self.events[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (7, 9), (64, 33), (3, 5, 41)])
def test_all_bytes_arrive(shape, dtype):
    rig = Rig(chunk_bytes=256)
    source = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    tensor = source.view(dtype)
    for _ in range(2):
        copy = rig.uploader.copy(tensor)
        assert copy.shape == tensor.shape and copy.dtype == dtype
        assert copy.data_ptr() != tensor.data_ptr()
        assert torch.equal(copy.view(torch.uint8), source)
    num_chunks = -(-source.numel() // 256)
    assert sum(event.num_recorded for event in rig.events) == 2 * num_chunks
    rig.uploader.close()
    assert not any(event.is_pending for event in rig.events)
    assert not [t for t in threading.enumerate() if t.name.startswith("mergestep-upload")]


def test_a_chunk_that_cannot_be_read_is_an_error(monkeypatch):
    def failing(part, buffer, event):
        raise OSError("the disk")

    monkeypatch.setattr(upload, "_read", failing)
    rig = Rig(chunk_bytes=256)
    with pytest.raises(OSError, match="the disk"):
        rig.uploader.copy(torch.zeros(5000))
    rig.uploader.close()


def test_other_devices_take_tensors_as_they_are():
    tensor = torch.arange(12.0)
    assert on_device(tensor, CPU) is tensor
    assert not upload._uploaders
    upload.free_uploaders()
