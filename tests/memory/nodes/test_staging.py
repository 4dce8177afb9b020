"""Rows between a device and this machine's memory (memory/nodes/staging.py), with copies that end
when the test says so, and a device whose tensors the host cannot read."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from memory.nodes.errors import NodesLostError
from memory.nodes.staging import DeviceStaging
from memory.nodes.wire import FULL_WIRE, WireFormat, WireType
from ops import get_backend
from tests.support.nodes.remote_rig import RemoteRig, layers_of, reference

pytestmark = pytest.mark.usefixtures("seeded")


class LateCopy:
    def __init__(self, run) -> None:
        self._run, self.is_over = run, False

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._run()


class LateCopier:
    """Copies as late as possible, in the order in which they were started. Until a copy to the
    device has ended its target is poison, and so is host memory that was not copied to."""

    def __init__(self) -> None:
        self.pending: deque[LateCopy] = deque()
        self.log: list[str] = []
        self.is_closed = False
        self.fails_after: int | None = None

    def pinned(self, num_bytes):
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN

    def _start(self, run) -> LateCopy:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise OSError(5, "the device is lost")
        copier = self

        class Copy(LateCopy):
            def wait(self) -> None:
                copier.log.append("wait")
                while not self.is_over:
                    copier.step()

        self.pending.append(Copy(run))
        return self.pending[-1]

    def step(self) -> None:
        self.pending.popleft().end()

    def to_host(self, pairs):
        def run() -> None:
            for host, x in pairs:
                host.copy_(x)

        self.log.append("to_host")
        return self._start(run)

    def to_device(self, host):
        target = torch.full_like(host, -1)
        # what was started before comes first; the device computes with the result at once
        while self.pending:
            self.step()
        self.log.append("to_device")
        found = self._start(lambda: target.copy_(host))
        self.step()
        return target, found

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def copier() -> LateCopier:
    return LateCopier()


@pytest.fixture
def staging(copier) -> DeviceStaging:
    return DeviceStaging(copier)


def test_a_post_has_the_rows_when_their_copy_has_ended(staging, copier):
    seen = []
    x, y = torch.randn(5, 2, 4), torch.randn(5, 2, 8)
    staging.send([x, y], (1, 4), lambda rows: seen.extend(r.clone() for r in rows))
    assert seen == [] and staging.buffers.num_taken == 1
    staging.flush()
    for found, sent in zip(seen, (x, y), strict=True):
        assert torch.equal(found[1:4], sent[1:4])
        assert found[[0, 4]].isnan().all(), "only the rows of the span are copied"
    assert staging.buffers.num_taken == 0


def test_posts_keep_their_order_and_do_not_wait_before_a_flush(staging, copier):
    order = []
    for number in range(3):
        staging.send([torch.zeros(2)], (0, 2), lambda rows, number=number: order.append(number))
    assert order == [] and "wait" not in copier.log
    copier.step()
    staging.send([torch.zeros(2)], (0, 2), lambda rows: order.append(3))
    assert order == [0], "what has arrived is posted by the next send"
    staging.flush()
    assert order == [0, 1, 2, 3]


def test_a_buffer_is_used_again_only_after_its_copy(staging, copier):
    staging.send([torch.ones(8)], (0, 8), lambda rows: None)
    staging.reset()  # the copy still writes to the buffer
    assert staging.buffers.num_taken == 0 and len(copier.pending) == 1
    seen = []
    staging.send([torch.full((8,), 2.0)], (0, 8), lambda rows: seen.append(rows[0].clone()))
    assert staging.buffers.num_made == 2
    staging.flush()
    assert torch.equal(seen[0], torch.full((8,), 2.0))
    for _ in range(5):
        staging.send([torch.ones(8)], (0, 8), lambda rows: None)
        staging.flush()
    assert staging.buffers.num_made == 2


def test_received_rows_are_those_of_the_message_although_it_is_overwritten(staging, copier):
    message = torch.randn(3, 4)
    kept = message.clone()
    found = staging.receive(message)
    message.fill_(7)
    assert torch.equal(found, kept)
    assert staging.buffers.num_taken == 0


def test_an_error_of_the_device_leaks_no_buffer(staging, copier):
    copier.fails_after = 0
    with pytest.raises(OSError, match="lost"):
        staging.send([torch.ones(8)], (0, 8), lambda rows: None)
    with pytest.raises(OSError, match="lost"):
        staging.receive(torch.ones(8))
    assert staging.buffers.num_taken == 0
    staging.close()
    assert copier.is_closed


def test_a_post_that_fails_leaks_no_buffer_and_the_rest_is_dropped(staging, copier):
    posted = []

    def fail(rows):
        raise NodesLostError("gone")

    staging.send([torch.ones(8)], (0, 8), fail)
    staging.send([torch.ones(8)], (0, 8), posted.append)
    with pytest.raises(NodesLostError):
        staging.flush()
    assert staging.buffers.num_taken == 1
    staging.reset()
    staging.flush()
    assert posted == [] and staging.buffers.num_taken == 0


# ---- attention over nodes


class OnDevice(torch.Tensor):
    """A tensor of a device: it has no address in this machine, and does not mix with its
    tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in ("data_ptr", "numpy", "tolist", "item"), f"{name} of a device's tensor"
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        mixed = [x for x in flat if isinstance(x, torch.Tensor) and type(x) is not cls]
        assert not [x for x in mixed if x.dim()], f"{name} mixes memories"
        return super().__torch_function__(function, types, args, kwargs or {})


def on_device(x):
    return None if x is None else x.as_subclass(OnDevice)


class DeviceCopier(LateCopier):
    """Copies between tensors of the host and of the device."""

    def to_host(self, pairs):
        assert all(type(x) is OnDevice and type(host) is torch.Tensor for host, x in pairs)
        return super().to_host([(host, x.as_subclass(torch.Tensor)) for host, x in pairs])

    def to_device(self, host):
        assert type(host) is torch.Tensor
        target, copy = super().to_device(host)
        return on_device(target), copy


class DeviceAttend:
    """New-token attention on the device, by the rig's own."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def plan(self, *arguments):
        return self._inner.plan(*arguments)

    def attend(self, plan, layer, *rows):
        plain = [None if x is None else x.as_subclass(torch.Tensor) for x in rows]
        out, lse = self._inner.attend(plan, layer, *plain)
        return on_device(out), on_device(lse)


class DeviceRig(RemoteRig):
    """Attention of a model on a device over the rig's nodes."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.copier = DeviceCopier()
        self.staging = self.attention.staging = DeviceStaging(self.copier)
        self.attention.new_token_attention = DeviceAttend(self.attention.new_token_attention)
        self.attention.backend = get_backend("reference")

    def step(self, rows, inputs):
        outs = super().step(rows, [[on_device(x) for x in of_layer] for of_layer in inputs])
        assert all(type(out) is OnDevice for out in outs)
        return [out.as_subclass(torch.Tensor) for out in outs]


def inputs_of(layers, num_rows):
    return [
        (
            torch.randn(num_rows, x.num_heads, x.head_dim),
            torch.randn(num_rows, x.num_kv_heads, x.head_dim),
            torch.randn(num_rows, x.num_kv_heads, x.head_dim),
        )
        for x in layers
    ]


@pytest.mark.parametrize("partition", ["head", "request", "sequence"])
@pytest.mark.parametrize("wire", [FULL_WIRE, WireFormat(WireType.INT8, WireType.BFLOAT16)])
def test_attention_of_a_device_over_nodes(partition, wire):
    """Chunks and decodes of two sequences equal attention in fp64 over all their keys."""
    layers = layers_of()
    rig = DeviceRig(layers, partition=partition, wire=wire)
    try:
        ranges = [rig.kv.open(8) for _ in range(2)]
        lens = [0, 0]
        history = [[[], []] for _ in layers]
        for num_rows in ((5, 17), (1, 9), (1, 1)):
            lens = [a + n for a, n in zip(lens, num_rows, strict=True)]
            inputs = inputs_of(layers, sum(num_rows))
            outs = rig.step(list(zip(ranges, num_rows, lens, strict=True)), inputs)
            for layer, (q, k, v), out, kept in zip(layers, inputs, outs, history, strict=True):
                first = 0
                for i, n in enumerate(num_rows):
                    own = slice(first, first + n)
                    kept[i].append((k[own], v[own]))
                    keys, values = (torch.cat(x) for x in zip(*kept[i], strict=True))
                    want = reference(layer, q[own], keys, values)
                    error = 1e-5 if wire is FULL_WIRE else 0.05
                    torch.testing.assert_close(out[own].double(), want, rtol=0, atol=error)
                    first += n
        assert rig.staging.buffers.num_taken == 0
    finally:
        rig.close()


def test_q_is_copied_before_k_and_v_and_nothing_waits_between():
    """`finish` has launched everything before the host waits for the first copy."""
    rig = DeviceRig(layers_of(1))
    try:
        target = rig.kv.open(4)
        rig.step([(target, 3, 3)], inputs_of(rig.layers, 3))
        rig.copier.log.clear()
        rig.step([(target, 1, 4)], inputs_of(rig.layers, 1))
        log = rig.copier.log
        assert log[:4] == ["to_host", "to_host", "wait", "wait"]
        assert log[4:] == ["to_device"] * len(rig.set.partitions[0].links)
    finally:
        rig.close()


def steps(rig, target):
    for length in range(4, 8):
        rig.step([(target, 1, length)], inputs_of(rig.layers, 1))


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_is_lost_at_any_point_leaks_no_buffer(seed):
    """After the loss the next step drops what the failed one has left."""
    rng = random.Random(seed)
    rig = DeviceRig(layers_of(3), partition=rng.choice(["head", "sequence"]))
    try:
        target = rig.kv.open(4)
        rig.step([(target, 3, 3)], inputs_of(rig.layers, 3))
        at = rng.randrange(8)
        staging, count = rig.staging, 0
        send = staging.send

        def send_and_kill(tensors, rows, post):
            nonlocal count
            if count == at:
                rig.nodes.kill(rng.choice(["a", "b"]))
            count += 1
            send(tensors, rows, post)

        staging.send = send_and_kill
        with pytest.raises(NodesLostError):
            steps(rig, target)
        staging.reset()
        while rig.copier.pending:
            rig.copier.step()
        assert staging.buffers.num_taken == 0
    finally:
        rig.close()
