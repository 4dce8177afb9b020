"""Pages of sequences of equal length are mapped over several steps, not in one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from memory.attention.cuda import CudaAttention, CudaKVLayout, step_arrays
from memory.attention.seam import AttentionLayer
from ops.cuda.device_sampler import DeviceSampler
from serve.runner.cuda_runner import CudaRunner
from serve.runner.graph_shapes import StepShapes
from serve.runner.step_device import CompletedEvent, Event, HostStepDevice
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.scheduler.step_plan import StepPlan
from tests.support.engine.fakes import check_mapping, make_kv, make_seq

NUM = 16
CPU = torch.device("cpu")


class Idle(HostStepDevice):
    """A device that drops its work."""

    def submit(self, work) -> Event:
        return CompletedEvent()


def rig(num_pages: int) -> tuple[CudaRunner, object, object]:
    kv, memory = make_kv(num_pages, NUM, 512, tokens_per_page=32, tile_tokens=16)
    layers = [AttentionLayer(4, 2, 64, 0.1)]
    layout = CudaKVLayout(layers, torch.int8, 64)
    arrays = step_arrays(layers, max_rows=64, max_seqs=NUM, max_len=512, device=CPU)
    attention = CudaAttention([layout], [[0]], [1 << 40], arrays)
    model = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=8), dtype=torch.float32, draft_head=None
    )
    sampler = DeviceSampler(100, NUM, NUM, CPU)
    return CudaRunner(model, kv, attention, sampler, Idle(), StepShapes(64, NUM)), kv, memory


def running(kv, num_tokens: int) -> list[Sequence]:
    made = []
    for i in range(NUM):
        sequence = make_seq(num_tokens, request_id=str(i), num_tokens=100)
        sequence.kv_range = kv.open(num_tokens)
        assert kv.grow(sequence.kv_range, num_tokens)
        sequence.num_computed_tokens = num_tokens - 1
        sequence.status = SequenceStatus.RUNNING
        made.append(sequence)
    kv.commit()
    return made


def steps(runner, kv, memory, sequences, count: int) -> list[int]:
    """Runs steps; returns the mapping calls of each."""
    calls = []
    for _ in range(count):
        for sequence in sequences:
            assert kv.grow(sequence.kv_range, sequence.num_computed_tokens + 1)
        plan = StepPlan(sequences, [1] * NUM, NUM, [True] * NUM, NUM)
        before = memory.num_calls
        runner.launch(plan, lambda: None)
        calls.append(memory.num_calls - before)
        for sequence in sequences:
            assert sequence.kv_range.capacity > sequence.num_computed_tokens
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(5)
    return calls


def test_growing_is_spread_over_steps():
    runner, kv, memory = rig(NUM * 16)
    calls = steps(runner, kv, memory, running(kv, 60), 80)
    assert sum(calls) >= 2 * NUM
    assert max(calls[:6]) <= 4, "all sequences are near the end of their page"
    assert max(calls[6:]) == 1
    check_mapping(kv, memory)
    kv.check_integrity()


def test_scarce_pages_are_not_taken_early():
    runner, kv, memory = rig(NUM * 4)
    calls = steps(runner, kv, memory, running(kv, 60), 30)
    assert sorted(calls)[-2:] == [0, NUM]


def test_no_sequence_grows_beyond_its_end():
    runner, kv, memory = rig(NUM * 16)
    sequences = running(kv, 60)
    for sequence in sequences:
        sequence.max_tokens_total = 64
    steps(runner, kv, memory, sequences, 4)
    assert all(sequence.kv_range.capacity == 64 for sequence in sequences)
