"""Models of which a part is on the disk beside a GPU: the same bits as in host memory, and a disk
that fails.

The device is Triton's interpreter; copies to it run as late as they may.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from serve.errors import ConfigError, WeightsLostError
from serve.loading.host_weights import cache, disk
from serve.loading.host_weights.disk import DiskFeed, DiskFile, pages
from serve.loading.streaming.reader import WeightReader
from serve.models import Decoder
from tests.support.cuda.late_link import (
    LateLink,
    experts_budget,
    host_weights,
    late_links,
    load_on_device,
    needs_of_model,
    ring_budget,
)
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import run, token_ids
from tests.support.models.streamed import FaultyFile, use_faulty

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the attention here is the host's"),
]
LONG = pytest.mark.exhaustive
FAULTS: list[object] = [
    "flipped",
    *(pytest.param(each, marks=LONG) for each in (errno.EIO, "short")),
]


def logits(model: Decoder) -> Tensor:
    return run(model, token_ids(4), [2, 1, 1])


def ring_host_bytes(path: Path, dtype: str, num_in_host: int) -> int:
    """Returns host memory for so many layers of the ring and two buffers."""
    return (num_in_host + 2) * max(each.products for each in needs_of_model(path, dtype).layers)


@pytest.fixture(autouse=True)
def _no_threads_left(tmp_path: Path):
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith("mergestep-io")]


@pytest.mark.parametrize(
    ("dtype", "num_in_host"),
    [("float32", 1), pytest.param("int8", 0, marks=LONG), pytest.param("bfloat16", 1, marks=LONG)],
)
def test_layers_from_the_disk_give_the_same_bits(dtype, num_in_host, tmp_path, monkeypatch):
    monkeypatch.setattr("serve.loading.host_weights.placement.BUFFERS", 2)
    path = checkpoint("llama", "four")
    budget, host = ring_budget(path, dtype), ring_host_bytes(path, dtype, num_in_host)
    with late_links():
        want = logits(load_on_device(path, dtype, None))
        model = load_on_device(path, dtype, budget, host, packed_cache=str(tmp_path))
        stream = host_weights(model)
        assert len(stream.placement.on_disk) == 4 - num_in_host
        assert stream.placement.host_bytes <= host
        assert not list(tmp_path.iterdir())  # the file has no name
        for _ in range(2):
            assert torch.equal(logits(model), want)
        stats = stream.stats()
        stream.close()
    assert stats.read_bytes > stream.placement.disk_bytes and not stats.failed


def test_passes_that_end_early_leave_the_disk_usable(tmp_path):
    path = checkpoint("llama", "four")
    budget, host = ring_budget(path, "float32"), ring_host_bytes(path, "float32", 0)
    with late_links():
        want = logits(load_on_device(path, "float32", None))
        model = load_on_device(path, "float32", budget, host, packed_cache=str(tmp_path))
        for count in (1, 3, 2):
            blocks = host_weights(model).blocks(model.weights.blocks)
            for _ in range(count):
                next(blocks)
            blocks.close()
            assert torch.equal(logits(model), want)
        host_weights(model).close()


@pytest.mark.parametrize(
    ("dtype", "family", "variant"),
    [
        ("float32", "qwen3_moe", "long"),
        pytest.param("int8", "qwen3_moe", "long", marks=LONG),
        pytest.param("int4", "qwen3_moe", "long", marks=LONG),
        pytest.param("bfloat16", "qwen2_moe", "shared", marks=LONG),
    ],
)
def test_experts_from_the_disk_give_the_bits_of_those_in_host_memory(
    dtype, family, variant, tmp_path
):
    path = checkpoint(family, variant)
    budget, needs = experts_budget(path, dtype, 2), needs_of_model(path, dtype)
    host = int(sum(each.experts for each in needs.layers) * 0.55)
    with late_links():
        want = logits(load_on_device(path, dtype, budget))
        model = load_on_device(path, dtype, budget, host, packed_cache=str(tmp_path))
        stream = host_weights(model)
        assert stream.placement.slot_bytes and stream.placement.disk_bytes
        for _ in range(3):
            assert torch.equal(logits(model), want)
        stats = stream.stats()
        stream.close()
    assert stats.expert_misses > 0 and stats.read_bytes > 0


def test_the_device_computes_no_experts_of_which_some_are_on_the_disk(tmp_path):
    path = checkpoint("qwen3_moe", "long")
    experts = [each.experts for each in needs_of_model(path, "float32").layers if each.experts]
    budget = experts_budget(path, "float32", 2) + max(experts) // 2  # room for half of a layer's
    with late_links(keeps_room=True, min_rows=1):
        for host, is_there in ((None, True), (int(0.55 * sum(experts)), False)):
            model = load_on_device(path, "float32", budget, host, packed_cache=str(tmp_path))
            stream = host_weights(model)
            assert (stream.placement.slot_bytes is None) == is_there
            assert (stream.on_device is not None) == is_there
            memories = [each.memory for each in stream.experts_on_cpu.values()]
            assert memories and all((each is not None) == is_there for each in memories)
            stream.close()


def test_a_start_that_fails_behind_the_file_stops_reading(tmp_path, monkeypatch):
    """The reads end before the memory goes to which they write; the fixture sees their threads."""
    path, closed = checkpoint("llama", "four"), list[bool]()

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    def close(reader: WeightReader) -> None:
        closed.append(links[-1].is_closed)
        reader._file.close()

    monkeypatch.setattr(cache, "DeviceRing", out_of_memory)
    monkeypatch.setattr(WeightReader, "close", close)
    limits = ring_budget(path, "float32"), ring_host_bytes(path, "float32", 0)
    with late_links() as links, pytest.raises(MemoryError):
        load_on_device(path, "float32", *limits, packed_cache=str(tmp_path))
    assert closed == [False] and links[-1].is_closed and not list(tmp_path.iterdir())


class Faulty:
    """A model with layers and experts on the disk, and its file."""

    def __init__(self, family: str, variant: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        path = checkpoint(family, variant)
        needs = needs_of_model(path, "float32")
        budget = ring_budget(path, "float32")
        experts = sum(each.experts for each in needs.layers)
        host = int(0.6 * experts) or ring_host_bytes(path, "float32", 0)
        self.files: list[FaultyFile] = use_faulty(patch, disk)
        self.want = logits(load_on_device(path, "float32", budget))
        self.model = load_on_device(path, "float32", budget, host, packed_cache=str(folder))
        assert host_weights(self.model).placement.disk_bytes


@pytest.fixture(params=[("llama", "four"), ("qwen3_moe", "long")], ids=["layers", "experts"])
def faulty(request, tmp_path, monkeypatch):
    with late_links():
        made = Faulty(*request.param, tmp_path, monkeypatch)
        yield made
        host_weights(made.model).close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_once_is_repeated(fault, faulty):
    seen: set[int] = set()
    faulty.files[0].fault = lambda t: None if t.offset in seen else seen.add(t.offset) or fault
    for _ in range(3):
        assert torch.equal(logits(faulty.model), faulty.want)
    stats = host_weights(faulty.model).stats()
    assert stats.repeated > 0 and stats.failed == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_fails_for_good_ends_the_step_and_heals(fault, faulty):
    assert torch.equal(logits(faulty.model), faulty.want)
    faulty.files[0].fault = lambda _: fault
    for _ in range(2):
        with pytest.raises(WeightsLostError, match="cannot be read from"):
            run_thrice(faulty)  # what was read before may suffice once
    assert host_weights(faulty.model).stats().failed > 0
    faulty.files[0].fault = lambda _: None
    for _ in range(2):
        assert torch.equal(logits(faulty.model), faulty.want)


def run_thrice(faulty: Faulty) -> None:
    for _ in range(3):
        assert torch.equal(logits(faulty.model), faulty.want)


@pytest.mark.exhaustive
def test_every_third_read_fails(faulty):
    file = faulty.files[0]
    file.fault = lambda _: errno.EIO if file.num_reads % 3 == 0 else None
    for _ in range(4):
        with suppress(WeightsLostError):
            assert torch.equal(logits(faulty.model), faulty.want)


def test_a_buffer_is_not_read_into_before_its_copy_has_ended(tmp_path):
    """With one buffer, every read would overwrite what the link has not copied yet."""
    link, file = LateLink(), DiskFile(tmp_path, 1 << 16)
    layers = [pages(8192).fill_(number + 1) for number in range(3)]
    units = [file.add(f"layer {number}", each) for number, each in enumerate(layers)]
    reader = file.open()
    feed = DiskFeed(reader, units, 1, link)
    targets = [torch.zeros(8192, dtype=torch.uint8) for _ in layers]
    waits = [feed.take(number, targets[number]) for number in range(3)]
    for wait in waits:
        wait()
    feed.release()
    reader.close()
    assert all(torch.equal(*each) for each in zip(targets, layers, strict=True))


def test_a_disk_that_cannot_take_the_file_is_named(tmp_path, monkeypatch):
    path = checkpoint("llama", "four")
    limits = ring_budget(path, "float32"), ring_host_bytes(path, "float32", 0)
    with late_links() as links:
        with pytest.raises(ConfigError, match=r"packed_cache off: .*host_weight_bytes"):
            load_on_device(path, "float32", *limits, packed_cache="off")
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "posix_fallocate", _full)
            with pytest.raises(ConfigError, match=r"packed_cache: .*No space left on device"):
                load_on_device(path, "float32", *limits, packed_cache=str(tmp_path))
        monkeypatch.setattr(disk, "write_at", _full)
        with pytest.raises(ConfigError, match=r"packed_cache: .*No space left on device"):
            load_on_device(path, "float32", *limits, packed_cache=str(tmp_path))
    assert all(link.is_closed for link in links) and not list(tmp_path.iterdir())


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_too_little_host_memory_is_refused(tmp_path):
    path = checkpoint("llama", "four")
    with late_links(), pytest.raises(ConfigError, match=r"host_weight_bytes 1 byte.* needs \d+"):
        load_on_device(path, "float32", ring_budget(path, "float32"), 1, packed_cache=str(tmp_path))


def test_the_setting_is_for_a_gpu():
    from serve.config import EngineConfig
    from serve.loading.model_source import read_source

    with pytest.raises(ConfigError, match="host_weight_bytes needs the cuda back end"):
        read_source(EngineConfig(str(checkpoint("llama", "four")), host_weight_bytes=1 << 20))
