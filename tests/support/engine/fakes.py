"""Fakes of the engine's parts: memory, K/V managers, requests, sequences and a scripted runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from memory.partitioned_kv import PartitionedKV
from serve.request import Request
from serve.runner.runner import StepResult
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import SchedulerLimits, StepPlan


class FakeMemory:
    """VirtualMemory as a dictionary: the page number at each mapped page-sized offset.

    content: what copies or a test wrote to a page, by position.
    """

    maps_during_kernels = True

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.mapped: dict[int, int] = {}
        self.content: dict[int, dict[int, int]] = {}
        self.num_calls = 0
        self.fail_next: str | None = None

    def reserve(self, size_bytes: int) -> int:
        return 0

    def prepare(self, first_page: int, num_pages: int) -> None:
        self._maybe_fail("prepare")

    def copy_page(self, source: int, target: int) -> None:
        self._maybe_fail("copy_page")
        self.content[target] = dict(self.content.get(source, {}))

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        self.num_calls += 1
        is_failing = self.fail_next == "map"
        for i in range((num_pages + 1) // 2 if is_failing else num_pages):
            self.mapped[offset + i * self.page_bytes] = first_page + i
        self._maybe_fail("map")  # half of the pages are mapped, as a device may leave them

    def _maybe_fail(self, call: str) -> None:
        if self.fail_next == call:
            self.fail_next = None
            raise OSError(12, "no memory")

    def unmap(self, offset: int, num_pages: int) -> None:
        self._maybe_fail("unmap")
        self.num_calls += 1
        for i in range(num_pages):
            self.mapped.pop(offset + i * self.page_bytes, None)

    def release(self, first_page: int, num_pages: int) -> None:
        held = set(self.mapped.values())
        assert not held & set(range(first_page, first_page + num_pages)), "still mapped"

    def close(self) -> None:
        self.mapped.clear()


def make_kv(
    num_pages: int = 64,
    num_ranges: int = 8,
    max_model_len: int = 128,
    tokens_per_page: int = 4,
    *,
    tile_tokens: int = 1,
    page_bytes: int | None = None,
    groups: tuple[LayerGroup, ...] = (),
    max_rows: int | None = None,
    in_background: bool = False,
    first_start: int = 0,
    manager: type[KVManager] = KVManager,
) -> tuple[KVManager, FakeMemory]:
    memory = FakeMemory(page_bytes or 64 * tokens_per_page)
    kv = manager(
        memory,
        num_pages=num_pages,
        num_ranges=num_ranges,
        max_model_len=max_model_len,
        token_bytes=64,
        tile_tokens=tile_tokens,
        groups=groups,
        max_rows=max_rows,
        in_background=in_background,
        first_start=first_start,
    )
    return kv, memory


def make_partitioned_kv(
    num_partitions: int, *args: Any, **kwargs: Any
) -> tuple[PartitionedKV, list[FakeMemory]]:
    """Makes that many K/V managers with consecutive ranges, as partitions of one."""
    made = [make_kv(*args, **kwargs)]
    first = made[0][0]
    for number in range(1, num_partitions):
        start = number * first.range_tokens * len(first.ranges)
        made.append(make_kv(*args, **kwargs, first_start=start))
    return PartitionedKV([kv for kv, _ in made]), [memory for _, memory in made]


def check_mapping(kv: KVManager, memory: FakeMemory) -> None:
    """Checks that the address space maps what the manager believes, at least sequences' pages."""
    expected: dict[int, int] = {}
    starts = set()
    for number, group in enumerate(kv.layout.groups):
        for item in kv.ranges:
            part = item.parts[number]
            held = part.pages[part.num_released : part.num_mapped]
            assert kv.space.maps(part.index, held, part.num_released), f"range {item.index}"
            start = kv.group_offset(number) + item.index * kv.range_tokens * group.token_bytes
            starts.add(start)
            for slot, page in enumerate(kv.space.mapped(part.index)):
                if page >= 0:
                    expected[start + slot * kv.page_bytes] = page
    assert memory.mapped == expected
    # pages that are adjacent in memory and in the file are one mapping
    num_mappings = sum(
        offset in starts or expected.get(offset - kv.page_bytes, -2) + 1 != page
        for offset, page in expected.items()
    )
    assert kv.space.num_mappings == num_mappings


def make_request(
    num_prompt: int = 5,
    request_id: str = "r",
    num_tokens: int = 8,
    prompt: Iterable[int] | None = None,
    **params: object,
) -> Request:
    """prompt: token ids; by default num_prompt ids from 10 on."""
    settings: dict[str, object] = {"temperature": 0.0, "seed": 0} | params
    sampling = SamplingParams(max_tokens=num_tokens, **settings)  # type: ignore[arg-type]
    ids = range(10, 10 + num_prompt) if prompt is None else prompt
    return Request(request_id, None, tuple(ids), sampling, 0.0)


def make_seq(num_prompt: int = 5, eos: frozenset[int] = frozenset(), **kwargs: object) -> Sequence:
    return make_sequences(make_request(num_prompt, **kwargs), eos)[0]  # type: ignore[arg-type]


def make_scheduler(
    kv: KVManager, max_num_seqs: int = 8, budget: int = 32, chunk: int | None = None
) -> Scheduler:
    return Scheduler(SchedulerLimits(max_num_seqs, budget, chunk or budget), kv)


class ScriptedRunner:
    """Samples tokens from a function of the sequence; `fails` makes a step raise for some
    sequences."""

    def __init__(
        self,
        kv: KVManager,
        script: Callable[[Sequence], int] = lambda s: 97 + len(s.token_ids) % 26,
        fails: Callable[[Sequence], bool] = lambda s: False,
        before: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self.kv = kv
        self.script = script
        self.fails = fails
        self.before = before
        self.num_runs = 0
        self.is_closed = False

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        launched()
        self.num_runs += 1
        self.before(plan)
        for sequence in plan.sequences:
            if self.fails(sequence):
                raise ZeroDivisionError("scripted failure")
        self.kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        sampled = [s for s, samples in zip(plan.sequences, plan.samples, strict=True) if samples]
        return StepResult(sampled, [self.script(s) for s in sampled], None)

    def close(self) -> None:
        self.is_closed = True
