"""Attention over memory nodes agrees with plain attention in higher precision."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from memory.nodes.errors import NoNodeError
from memory.nodes.node_states import NodeStates
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import FULL_WIRE, WireFormat, WireType
from ops import get_backend
from ops.reference import round_kv4
from quant.kv import fitting_int4_group
from tests.support.nodes.remote_rig import MIB, RemoteRig, layers_of, reference
from transport.base import TransportTimeoutError
from transport.direct import direct_pair

BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 3e-2, "int4": 6e-2}


class Histories:
    """Holds each sequence's q, k and v, layer by layer."""

    def __init__(self, layers, seed=0, kv_dtype=None):
        """kv_dtype: results are expected from int4 K/V as it is rounded."""
        self.layers = layers
        self.is_int4 = kv_dtype == "int4"
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = {}
        self.values = {}

    def rows(self, sequences):
        """Takes (name, number of rows) and returns the inputs of each layer and the expected
        results."""
        inputs, expected = [], []
        for number, layer in enumerate(self.layers):
            qs, ks, vs, outs = [], [], [], []
            for name, n in sequences:
                q = torch.randn(n, layer.num_heads, layer.head_dim, generator=self.generator)
                k, v = (
                    torch.randn(n, layer.num_kv_heads, layer.head_dim, generator=self.generator)
                    for _ in range(2)
                )
                at = (name, number)
                empty = k[:0]
                self.keys[at] = torch.cat([self.keys.get(at, empty), k])
                self.values[at] = torch.cat([self.values.get(at, empty), v])
                kv = self.keys[at], self.values[at]
                if self.is_int4:
                    kv = [round_kv4(x, fitting_int4_group(layer.head_dim, 64)) for x in kv]
                outs.append(reference(layer, q, *kv))
                qs.append(q)
                ks.append(k)
                vs.append(v)
            inputs.append((torch.cat(qs), torch.cat(ks), torch.cat(vs)))
            expected.append(torch.cat(outs))
        return inputs, expected


def run_mixed(rig, layers, kv_dtype, wire=FULL_WIRE):
    """Runs prompt chunks beside decode rows over several steps."""
    histories = Histories(layers, kv_dtype=kv_dtype)
    lengths = dict.fromkeys("xyz", 0)
    items = {name: rig.kv.open(600) for name in lengths}
    bound = BOUNDS[kv_dtype] + (3e-2 if wire.rows is WireType.INT8 else 0)
    steps = [
        [("x", 20), ("y", 33)],
        [("x", 1), ("y", 1), ("z", 50)],
        [("x", 1), ("z", 130)],
        [("y", 1), ("x", 17), ("z", 64)],
        [("x", 1), ("y", 1), ("z", 1)],
    ]
    for sequences in steps:
        inputs, expected = histories.rows(sequences)
        rows = []
        for name, n in sequences:
            lengths[name] += n
            rows.append((items[name], n, lengths[name]))
        for out, due in zip(rig.step(rows, inputs), expected, strict=True):
            assert float((out - due).abs().max()) < bound
    for item in items.values():
        rig.kv.close(item)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("partition", "names"),
    [
        ("head", "a"),
        ("head", "ab"),
        ("head", "abc"),
        ("head", "abcd"),
        ("sequence", "ab"),
        ("sequence", "abc"),
        ("sequence", "abcd"),
    ],
)
def test_any_partition_gives_plain_attention(kv_dtype, partition, names):
    layers = layers_of()
    rig = RemoteRig(layers, tuple(names), partition, kv_dtype)
    run_mixed(rig, layers, kv_dtype)
    rig.close()
    assert rig.nodes.leased() == 0


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_sliding_windows(kv_dtype):
    layers = layers_of(3, windows=(None, 40, 40))
    rig = RemoteRig(layers, ("a", "b"), "head", kv_dtype)
    run_mixed(rig, layers, kv_dtype)
    rig.close()


@pytest.mark.parametrize(
    "wire",
    [
        WireFormat(WireType.BFLOAT16, WireType.FLOAT32),
        WireFormat(WireType.BFLOAT16, WireType.BFLOAT16),
        WireFormat(WireType.INT8, WireType.BFLOAT16),
    ],
)
def test_fewer_bits_on_the_wire(wire):
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), "head", "int8", wire)
    run_mixed(rig, layers, "int8", wire)
    rig.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("partition", ["head", "sequence"])
def test_prompt_tails_are_cached_until_they_are_read(kv_dtype, partition):
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), partition, kv_dtype, tail_bytes=1 << 22)
    run_mixed(rig, layers, kv_dtype)
    assert rig.tail_cache.num_pages_in_use == 0
    rig.close()


@pytest.mark.parametrize(("tail_bytes", "num_queries"), [(1 << 22, 0), (0, 3 * 2 * 2)])
def test_a_cached_prompt_tail_needs_no_queries_to_nodes(tail_bytes, num_queries):
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), tail_bytes=tail_bytes)
    histories, item = Histories(layers), rig.kv.open(150)
    for length in (50, 100, 150):
        inputs, _ = histories.rows([("x", 50)])
        rig.step([(item, 50, length)], inputs)
    assert sum(node.stats().num_queries for node in rig.nodes.nodes.values()) == num_queries
    rig.kv.close(item)
    rig.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_little_memory_for_prompts_changes_nothing(kv_dtype):
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), "head", kv_dtype, tail_bytes=1 << 16)
    run_mixed(rig, layers, kv_dtype)
    rig.close()


def test_sliding_windows_with_cached_prompt_tails():
    layers = layers_of(3, windows=(None, 40, 40))
    rig = RemoteRig(layers, ("a", "b"), "head", "int8", tail_bytes=1 << 22)
    run_mixed(rig, layers, "int8")
    rig.close()


class OwnMemory:
    """The engine's own memory, for when no node is left; until then its bytes hold the prompt
    tail cache."""

    def __init__(self, rig, num_bytes):
        self.node = MemoryNode(num_bytes, get_backend("cpu"))
        self._tail_cache = rig.tail_cache
        rig.set._local = self._attach

    def _attach(self):
        engine_end, node_end = direct_pair()
        self.node.adopt(node_end)
        return engine_end

    @property
    def is_leased(self):
        return self.node.stats().bytes_leased > 0

    @property
    def keeps_prompts(self):
        """Whether the system has granted memory for the prompt tail cache."""
        return self._tail_cache._kv.num_mapped > 0


def chunks_of_a_prompt(rig, histories, name):
    """Runs two chunks of a prompt, checks their results and returns the range."""
    item = rig.kv.open(200)
    for num_rows, length in ((60, 60), (50, 110)):
        inputs, expected = histories.rows([(name, num_rows)])
        for out, due in zip(rig.step([(item, num_rows, length)], inputs), expected, strict=True):
            assert float((out - due).abs().max()) < 1e-5
    return item


def place_again(rig, item):
    """Places the partition again after its nodes have lost everything; `item` was the only
    range."""
    [partition] = rig.set.partitions
    rig.kv.close(item)
    rig.set.place(partition)
    rig.kv.reset(partition.num_pages)
    partition.edits.take()
    return partition.is_local


def test_own_memory_holds_prompt_tails_or_all_of_the_kv():
    layers = layers_of()
    rig = RemoteRig(layers, tail_bytes=MIB)
    own, histories = OwnMemory(rig, MIB), Histories(layers)
    item = chunks_of_a_prompt(rig, histories, "x")
    assert own.keeps_prompts and not own.is_leased
    rig.nodes.kill("a")
    rig.nodes.kill("b")
    assert place_again(rig, item)
    assert own.is_leased
    item = chunks_of_a_prompt(rig, histories, "y")
    assert not own.keeps_prompts, "this machine's memory holds K/V twice"
    rig.nodes.gone.clear()
    rig.set.states = NodeStates(["a", "b"], "test", time.monotonic)  # their probation is over
    assert not place_again(rig, item)
    assert not own.is_leased
    chunks_of_a_prompt(rig, histories, "z")
    assert own.keeps_prompts
    rig.close()


def test_prompts_on_other_nodes_continue_when_own_memory_replaces_a_node():
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), "request", tail_bytes=MIB)
    own, histories = OwnMemory(rig, MIB), Histories(layers)
    rig.kv = rig.kvs[1]
    item = chunks_of_a_prompt(rig, histories, "x")
    assert own.keeps_prompts
    rig.nodes.kill("a")
    rig.set.place(rig.set.partitions[0])
    assert rig.set.partitions[0].is_local and not rig.set.partitions[1].is_lost
    inputs, expected = histories.rows([("x", 50)])
    for out, due in zip(rig.step([(item, 50, 160)], inputs), expected, strict=True):
        assert float((out - due).abs().max()) < 1e-5
    assert not own.keeps_prompts
    rig.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_a_prompt_that_cannot_be_cached_is_left_to_the_nodes(kv_dtype, monkeypatch):
    """Every second mapping fails, and the results stay the same."""
    layers = layers_of()
    rig = RemoteRig(layers, ("a", "b"), "head", kv_dtype, tail_bytes=1 << 22)
    memory, calls = rig.tail_cache._memory, itertools.count()
    mapped = memory.map

    def fail(*arguments):
        if next(calls) % 2:
            raise OSError(errno.ENOMEM, "no mappings left")
        mapped(*arguments)

    monkeypatch.setattr(memory, "map", fail)
    run_mixed(rig, layers, kv_dtype)
    assert next(calls) > 2
    assert rig.tail_cache.num_pages_in_use == 0
    rig.close()


def test_a_node_that_is_too_small_is_left_out():
    """Node b returns with too little memory for its shard, and a takes all of it."""
    rig = RemoteRig(layers_of(), ("a", "b"), num_pages=40)
    rig.set.min_pages = 30
    rig.nodes.kill("b")
    rig.nodes.nodes["b"] = MemoryNode(1 << 16, get_backend("cpu"))
    rig.nodes.gone.clear()
    [partition] = rig.set.partitions
    rig.set.place(partition)
    assert [link.url for link in partition.links] == ["a"]
    assert partition.num_pages >= 30
    assert rig.set.find_returned() == []  # the small node is not asked again
    rig.close()


def test_without_a_thread_nodes_are_found_later():
    def no_pool(count):
        raise RuntimeError("can't start new thread")

    rig = RemoteRig(layers_of())
    rig.set._pool = no_pool
    with pytest.raises(NoNodeError, match="new thread"):
        rig.set.place(rig.set.partitions[0])
    rig.set._pool = ThreadPoolExecutor
    rig.set.place(rig.set.partitions[0])
    rig.close()


def test_a_slow_name_lookup_blocks_nothing():
    rig = RemoteRig(layers_of())
    connect, slow = rig.nodes.connect, threading.Event()

    def connect_slowly(url, timeout_s):
        if url == "b":
            slow.wait(30)
        return connect(url, timeout_s)

    rig.set.connect = connect_slowly
    began = time.monotonic()
    rig.set.place(rig.set.partitions[0], 0.1)
    assert time.monotonic() - began < 5
    assert [link.url for link in rig.set.partitions[0].links] == ["a"]
    slow.set()
    rig.close()


def test_a_node_that_has_just_failed_is_not_tried_again_beside_the_unusable_ones():
    rig = RemoteRig(layers_of())
    connect, tried = rig.nodes.connect, []

    def counted(url, timeout_s):
        tried.append(url)
        return connect(url, timeout_s)

    rig.set.connect = counted
    for url in ("a", "b"):
        rig.nodes.kill(url)
    rig.set.states._nodes["b"].lose(0.0, was_silent=True)
    with pytest.raises(NoNodeError):
        rig.set.place(rig.set.partitions[0])
    assert tried == ["a", "b"]
    rig.close()


def test_nodes_far_away_are_found_again():
    """Connecting takes 0.6 s, which is longer than the time limit for a nearby node."""
    rig = RemoteRig(layers_of())
    connect, now = rig.nodes.connect, [0.0]

    def connect_far(url, timeout_s):
        if timeout_s < 0.6:
            raise TransportTimeoutError(f"{url}: no answer in time")
        now[0] += 0.6  # for connections made in turn, on the test's own clock
        return connect(url, timeout_s)

    rig.set.connect, rig.set._clock = connect_far, lambda: now[0]
    [partition] = rig.set.partitions
    with pytest.raises(NoNodeError):
        rig.set.place(partition)
    rig.set.place(partition, 5.0, needs_all=True)  # as at start-up
    assert rig.set.connect_s == 1.0, "a fourfold time limit would be too long"
    rig.set.place(partition)
    assert [link.url for link in partition.links] == ["a", "b"]
    rig.nodes.kill("b")
    rig.set.place(partition)
    rig.nodes.gone.clear()
    assert rig.set.find_returned() == ["b"]
    rig.close()


@pytest.mark.parametrize(
    ("partition", "windows", "takes_rest"),
    [("head", (), False), ("sequence", (None, 40), False), ("sequence", (), True)],
)
def test_the_rest_of_a_prompt_is_cached_only_where_results_are_merged(
    partition, windows, takes_rest
):
    """The prompt's beginning came from the prefix cache. Windows are counted on the nodes from the
    end of their K/V."""
    layers = layers_of(2, windows=windows)
    rig = RemoteRig(layers, ("a", "b"), partition, "int8", tail_bytes=1 << 22)
    assert (rig.tail_cache.extend(0, 30, 20) is not None) == takes_rest
    rig.tail_cache.drop(0)
    assert rig.tail_cache.num_pages_in_use == 0
    assert rig.tail_cache.extend(0, 0, 20) is not None
    assert rig.tail_cache.extend(0, 20, 20) is not None
    rig.tail_cache.drop(0)
    rig.close()
