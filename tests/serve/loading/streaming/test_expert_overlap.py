"""While some experts are read, those that are there are computed, with the bits of one call."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.backend import ExpertsOp, Fusion, Routing
from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_experts import NativeExperts
from ops.cpu.native_quantized_linear import NATIVE
from serve.errors import WeightsLostError
from serve.loading.streaming import experts as module
from serve.loading.streaming.experts import ExpertSlots
from serve.loading.streaming.reader import Fetch, ReadStats
from serve.loading.streaming.units import Unit

EXPERTS, TOP_K, SIZE, INNER = 8, 3, 96, 40
SILU = Fusion(None, "silu", True)

needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)


class LateReader:
    """A reader whose experts come when one of them is waited for: that one, and others at
    random."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.stats = ReadStats()
        self.coming: dict[str, Fetch] = {}
        self.log: list[str] = []
        self.lost: str | None = None

    def fetch(self, unit: Unit, address: int) -> Fetch:
        fetch = self.coming[unit.name] = Fetch(unit.name, 1)
        self.log.append(f"read {unit.name}")
        return fetch

    def wait(self, fetch: Fetch) -> None:
        if not fetch.is_done:
            self.log.append("wait")
            others = [name for name in self.coming if self._draw.random() < 0.3]
            for name in {fetch.name, *others}:
                is_lost = name == self.lost
                self.coming.pop(name).end_piece(WeightsLostError("gone") if is_lost else None)
        fetch.wait()


class LoggedOp:
    """An ExpertsOp that notes which slots are computed."""

    def __init__(self, op: ExpertsOp, log: list[str]) -> None:
        self._op, self._log = op, log

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        slots = np.unique(routing.experts.numpy()).tolist()
        self._log.append("compute " + " ".join(map(str, slots)))
        return self._op(x, routing, residual)


def native(kind: str, *, scales_input: bool) -> NativeExperts:
    def pack(weight: Tensor, fusion: Fusion):
        if kind == "int8":
            return NATIVE.int8([weight], None, fusion)
        return CpuBackend().pack_linear(weight.to(getattr(torch, kind)), None, fusion)

    ups = [pack(torch.randn(2 * INNER, SIZE) / SIZE**0.5, SILU) for _ in range(EXPERTS)]
    downs = [pack(torch.randn(SIZE, INNER) / INNER**0.5, Fusion()) for _ in range(EXPERTS)]
    return NativeExperts(ups, downs, scales_input)


def slots_with(
    op: ExpertsOp, there: list[int], reader: LateReader, *, scales_input: bool = False
) -> ExpertSlots:
    """Returns slots of one mixture, each for the expert of its number; only some are there. Free
    slots are taken in their order, so that those which are read get their own."""
    units = [[Unit(f"{expert}", (), 0) for expert in range(EXPERTS)]]
    logged = LoggedOp(op, reader.log)
    slots = ExpertSlots(
        units, list(range(EXPERTS)), logged, num_out=SIZE, scales_input=scales_input
    )
    slots.reader = reader  # type: ignore[assignment]
    for expert in there:
        slots.fill(expert, 0, expert)
    return slots


def random_routing(rows: int) -> Routing:
    chosen = torch.rand(rows, EXPERTS).argsort(1)[:, :TOP_K]
    return Routing(chosen.int(), torch.rand(rows, TOP_K))


def every_expert(rows: int) -> Routing:
    """Returns a routing that uses all experts."""
    routing = random_routing(rows)
    flat = routing.experts.view(-1)
    for row in range(rows):
        chosen = [(row * TOP_K + k) % EXPERTS for k in range(TOP_K)]
        flat[row * TOP_K : (row + 1) * TOP_K] = torch.tensor(chosen, dtype=torch.int32)
    return routing


@needs_kernels
@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "float32"])
def test_the_bits_are_those_of_one_call(kind: str, scales_input: bool, rows: int) -> None:
    op = native(kind, scales_input=scales_input)
    dtype = torch.float32 if kind == "int8" else getattr(torch, kind)
    for seed in range(6):
        draw = random.Random(seed)
        reader = LateReader(draw)
        there = sorted(draw.sample(range(EXPERTS), draw.randrange(EXPERTS)))
        x, routing = torch.randn(rows, SIZE).to(dtype), every_expert(rows)
        residual = torch.randn(rows, SIZE).to(dtype) if seed % 2 else None
        want = op(x, routing, None if residual is None else residual.clone())
        slots = slots_with(op, there, reader, scales_input=scales_input)
        made = slots.compute(0, x, routing, residual)
        assert made.dtype == want.dtype and torch.equal(made, want)
        assert sum(line.startswith("compute") for line in reader.log) > 1


@needs_kernels
@pytest.mark.usefixtures("seeded")
def test_what_is_there_is_computed_before_anything_is_waited_for() -> None:
    reader = LateReader(random.Random(0))
    slots = slots_with(native("int8", scales_input=False), [1, 2, 5], reader)
    slots.compute(0, torch.randn(4, SIZE), every_expert(4), None)
    assert reader.log[:6] == [f"read {e}" for e in (0, 3, 4, 6, 7)] + ["compute 1 2 5"]
    rest = reader.log[6:]
    assert rest[0] == "wait"
    for line, after in zip(rest, [*rest[1:], ""], strict=True):
        if line == "wait":
            assert after.startswith("compute"), "what came is computed at once"
    computed = [int(name) for line in rest for name in line.split()[1:]]
    assert sorted(computed) == [0, 3, 4, 6, 7], "each once"


@needs_kernels
@pytest.mark.usefixtures("seeded")
def test_experts_that_are_all_there_are_computed_in_one_call() -> None:
    reader = LateReader(random.Random(0))
    slots = slots_with(native("int8", scales_input=False), list(range(EXPERTS)), reader)
    slots.compute(0, torch.randn(4, SIZE), every_expert(4), None)
    assert reader.log == ["compute 0 1 2 3 4 5 6 7"]


@needs_kernels
@pytest.mark.usefixtures("seeded")
def test_many_rows_wait_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results would need too much memory."""
    monkeypatch.setattr(module, "MAX_SUM_BYTES", 4 * 8 * TOP_K * SIZE)
    for rows, is_split in ((8, True), (9, False)):
        reader = LateReader(random.Random(0))
        slots = slots_with(native("int8", scales_input=False), [1, 2, 5], reader)
        slots.compute(0, torch.randn(rows, SIZE), every_expert(rows), None)
        calls = sum(line.startswith("compute") for line in reader.log)
        assert (calls > 1) == is_split


@needs_kernels
@pytest.mark.usefixtures("seeded")
def test_one_that_is_lost_is_an_error_and_read_again_by_the_next_step() -> None:
    op = native("int8", scales_input=False)
    reader = LateReader(random.Random(1))
    slots = slots_with(op, [1, 2, 5], reader)
    x, routing = torch.randn(4, SIZE), every_expert(4)
    residual = torch.randn(4, SIZE)
    kept = residual.clone()
    reader.lost = "4"
    with pytest.raises(WeightsLostError):
        slots.compute(0, x, routing, residual)
    assert torch.equal(residual, kept) and (0, 4) not in slots.content()
    reader.lost = None
    assert torch.equal(slots.compute(0, x, routing, residual), op(x, routing, kept))
    assert reader.log.count("read 4") == 2


class SuddenlyLost(Fetch):
    """A fetch that fails just after it was looked at."""

    @property
    def is_done(self) -> bool:
        was_done = super().is_done
        if not was_done:
            self.end_piece(WeightsLostError("gone"))
        return was_done


@needs_kernels
@pytest.mark.usefixtures("seeded")
def test_one_that_fails_while_it_is_looked_at_is_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = LateReader(random.Random(0))
    monkeypatch.setattr(reader, "fetch", lambda unit, _: SuddenlyLost(unit.name, 1))
    slots = slots_with(native("int8", scales_input=False), [1, 2, 5], reader)
    with pytest.raises(WeightsLostError):
        slots.compute(0, torch.randn(4, SIZE), every_expert(4), None)
