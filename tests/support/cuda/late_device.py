"""A device that computes later than it is told to, and an overlapping runner on it.

Its K/V is (position, token) for every place of every page, written and read in the order of the
steps through the page tables of the moment in which a step runs. A token is a function of what
its row reads there, so a wrong input, a wrong position, a stale range or a page that was given
away too early changes it; most of these are also seen at once (`LateDevice.faults`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memory.kv_manager import KVManager
from memory.pages.kv_range import Range
from ops.cpu.sampling import SAMPLED_ROW
from serve.request import TokenDelta, TokenLogprobs
from serve.runner.prompt_reader import PromptRowRequest, prompt_row_requests
from serve.runner.runner import StepResult
from serve.scheduler.prompt_outputs import Pooled, PromptPart, PromptScores
from serve.scheduler.sequence import PENDING_TOKEN, Sequence
from serve.scheduler.step_plan import StepPlan
from tests.support.engine.fakes import FakeMemory

WINDOW = 8  # tokens that the next one depends on
EOS = 5
GARBAGE = 77_777


def next_token(position: int, recent: tuple[int, ...], num_tokens: int = 23) -> int:
    """What a step samples after `recent`, the last WINDOW tokens up to `position`. From 3 on."""
    value = position + 1
    for token in recent:
        value = (value * 1_000_003 + token + 17) % 2_147_483_647
    return 3 + value % num_tokens


def expected_tokens(sequence: Sequence, num_tokens: int = 23) -> list[int]:
    """Prompt and output of an uninterrupted run."""
    tokens = list(sequence.request.prompt_token_ids)
    while len(tokens) < sequence.max_tokens_total:
        tokens.append(next_token(len(tokens) - 1, tuple(tokens[-WINDOW:]), num_tokens))
        if tokens[-1] in sequence.stop_ids and len(tokens) > sequence.min_tokens_total:
            break
    return tokens


class LateDevice:
    """Runs what is queued in order: when somebody waits for it (thread=False; then time is
    virtual), or in a thread, each `seconds` after the one before.

    events: ("launch" | "begin" | "end", number). faults: what a step found wrong. idle_s: between
    steps, in virtual time.
    """

    def __init__(self, seconds: float = 0.0, *, thread: bool = False) -> None:
        self.seconds = seconds
        self.now_s = 0.0
        self.free_at_s: float | None = None
        self.idle_s = 0.0
        self.events: list[tuple[str, int]] = []
        self.faults: list[str] = []
        self.num_launched = 0
        self._queue: deque[Job] = deque()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._thread = threading.Thread(target=self._work) if thread else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, work: Callable[[], list[int]]) -> Job:
        job = Job(self.num_launched, work)
        self.num_launched += 1
        self.events.append(("launch", job.number))
        if self.free_at_s is not None:
            self.idle_s += max(0.0, self.now_s - self.free_at_s)
        self.free_at_s = job.ends_s = max(self.free_at_s or 0.0, self.now_s) + self.seconds
        self._last = job
        if self._thread is None:
            self._queue.append(job)
        else:
            self._jobs.put(job)
        return job

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done.is_set()

    def wait(self, job: Job) -> list[int]:
        while self._thread is None and not job.done.is_set():
            self._run(self._queue.popleft())
        job.done.wait()
        self.now_s = max(self.now_s, job.ends_s)
        if job.error is not None:
            raise job.error
        return job.tokens

    def run_some(self, number: int) -> None:
        """The device happens to be so far."""
        for _ in range(min(number, len(self._queue))):
            self._run(self._queue.popleft())

    def synchronize(self) -> None:
        self.run_some(len(self._queue))
        if self._last is not None:
            self._last.done.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(self.seconds)
            self._run(job)

    def _run(self, job: Job) -> None:
        self.events.append(("begin", job.number))
        try:
            job.tokens = job.work()
        except Exception as error:
            job.error = error
        self.events.append(("end", job.number))
        job.done.set()


@dataclass
class Job:
    number: int
    work: Callable[[], list[int]]
    ends_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class LateMemory(FakeMemory):
    """What CudaMemory does: places are only changed, and pages only copied, behind the device."""

    def __init__(self, page_bytes: int, device: LateDevice) -> None:
        super().__init__(page_bytes)
        self.device = device

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        if any(offset + i * self.page_bytes in self.mapped for i in range(num_pages)):
            self.device.synchronize()
        super().map(offset, first_page, num_pages)

    def unmap(self, offset: int, num_pages: int) -> None:
        self.device.synchronize()
        super().unmap(offset, num_pages)

    def copy_page(self, source: int, target: int) -> None:
        self.device.synchronize()
        super().copy_page(source, target)

    def release(self, first_page: int, num_pages: int) -> None:
        if not self.device.is_idle:
            self.device.faults.append("memory is given back under a step in flight")
        super().release(first_page, num_pages)


@dataclass(slots=True)
class Rows:
    """Of one sequence in a step, as noted at the launch. first: their first position; tokens:
    their inputs; known: all tokens before them that the host knew."""

    sequence: Sequence
    target: Range
    first: int
    tokens: list[int]
    known: list[int]
    samples: bool


class LateRunner:
    """fails_launch, fails_wait: a launch, a step raises for these sequences. needs: those whose
    tokens must be known before they are launched. memory: whose page tables count; None: the
    books at the launch do."""

    def __init__(
        self,
        kv: KVManager,
        device: LateDevice,
        memory: LateMemory | None = None,
        *,
        num_tokens: int = 23,
        host_s: float = 0.0,
        fails_launch: Callable[[Sequence], bool] = lambda s: False,
        fails_wait: Callable[[Sequence], bool] = lambda s: False,
        needs: Callable[[Sequence], bool] = lambda s: False,
    ) -> None:
        self.kv = kv
        self.device = device
        self.memory = memory
        self.num_tokens = num_tokens
        self.host_s = host_s
        self.fails_launch = fails_launch
        self.fails_wait = fails_wait
        self.needs = needs
        self.last: dict[int, int] = {}  # the device's own: last token by range
        self.content: dict[int, dict[int, tuple[int, int]]] = (
            {} if memory is None else memory.content  # type: ignore[assignment]
        )
        self.in_flight: list[Late] = []
        self.num_pending = 0  # inputs that the host did not know
        self.is_closed = False

    def check(self) -> None:
        """It goes on after every failure."""

    def needs_tokens(self, plan: StepPlan) -> bool:
        return any(self.needs(sequence) for sequence in plan.sequences)

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        assert not self.in_flight, "one at a time"
        return self.launch(plan, launched).wait()

    def launch(self, plan: StepPlan, launched: Callable[[], None]) -> Late:
        self.device.now_s += self.host_s
        if any(self.fails_launch(sequence) for sequence in plan.sequences):
            raise ZeroDivisionError("scripted failure of a launch")
        self.kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        step = [
            self._rows(*item)
            for item in zip(plan.sequences, plan.num_rows, plan.samples, strict=True)
        ]
        assert not (self.in_flight and self.needs_tokens(plan)), "tokens are not known"
        assert len(self.in_flight) < 2
        books = [self._tables(rows.target) for rows in step] if self.memory is None else None
        is_bad = any(self.fails_wait(rows.sequence) for rows in step)
        faults: list[str] = []
        seen: list[int] = []
        job = self.device.submit(lambda: self._compute(step, books, is_bad, faults, seen))
        sampled = [rows.sequence for rows in step if rows.samples]
        behind = self.in_flight[-1] if self.in_flight else None
        late = Late(self, job, sampled, faults, behind, (prompt_row_requests(plan), seen))
        self.in_flight.append(late)
        launched()
        return late

    def _rows(self, sequence: Sequence, count: int, samples: bool) -> Rows:
        assert sequence.kv_range is not None
        first = sequence.num_computed_tokens
        tokens = sequence.token_ids[first : first + count]
        assert len(tokens) == count and sequence.kv_range.capacity >= first + count
        assert PENDING_TOKEN not in tokens[:-1], "only the last one can be in flight"
        assert PENDING_TOKEN not in sequence.token_ids[:first]
        self.num_pending += tokens[-1] == PENDING_TOKEN
        known = sequence.token_ids[:first]
        return Rows(sequence, sequence.kv_range, first, tokens, known, samples)

    # ---- on the device

    def _compute(
        self,
        step: list[Rows],
        books: list[list[list[int]]] | None,
        is_bad: bool,
        faults: list[str],
        seen: list[int],
    ) -> list[int]:
        """seen: what each row would be followed by."""
        sampled: list[int] = []
        for number, rows in enumerate(step):
            tables = self._mapped(rows.target) if books is None else books[number]
            if rows.tokens[-1] == PENDING_TOKEN:
                rows.tokens[-1] = self.last[rows.target.start]
            for offset, token in enumerate(rows.tokens):
                written = GARBAGE if is_bad else token
                self._write(rows, tables, rows.first + offset, written, faults)
            if is_bad:
                self.last[rows.target.start] = GARBAGE
                continue
            ends = range(rows.first, rows.first + len(rows.tokens))
            recent = [self._read(rows, tables, end, faults) for end in ends]
            seen += [
                next_token(end, tokens, self.num_tokens)
                for end, tokens in zip(ends, recent, strict=True)
            ]
            if rows.samples:
                self.last[rows.target.start] = seen[-1]
                sampled.append(seen[-1])
        if is_bad:
            raise ZeroDivisionError("scripted failure of a step")
        return sampled

    def _tables(self, target: Range) -> list[list[int]]:
        return [list(part.pages) for part in target.parts]

    def _mapped(self, target: Range) -> list[list[int]]:
        """Pages at the range's places now; -1: none."""
        assert self.memory is not None
        kv, tables = self.kv, []
        for number, part in enumerate(target.parts):
            start = kv.group_offset(number) + target.index * kv.range_tokens * (
                part.group.token_bytes
            )
            places = range(part.group.slots_for(kv.max_model_len))
            mapped = self.memory.mapped
            tables.append([mapped.get(start + place * kv.page_bytes, -1) for place in places])
        return tables

    def _write(
        self, rows: Rows, tables: list[list[int]], position: int, token: int, faults: list[str]
    ) -> None:
        for part, table in zip(rows.target.parts, tables, strict=True):
            place, offset = divmod(position, part.group.tokens_in(1))
            if table[place] < 0:
                faults.append(f"position {position} has no page")
                continue
            self.content.setdefault(table[place], {})[offset] = (position, token)

    def _read(
        self, rows: Rows, tables: list[list[int]], last: int, faults: list[str]
    ) -> tuple[int, ...]:
        """The last tokens up to a position; checks all that its attention would look at."""
        found: list[int] = []
        for part, table in zip(rows.target.parts, tables, strict=True):
            window = part.group.window or last + 1
            found = []
            for position in range(max(0, last + 1 - window), last + 1):
                place, offset = divmod(position, part.group.tokens_in(1))
                there = self.content.get(table[place], {}).get(offset)
                is_new = position >= rows.first
                wanted = rows.tokens[position - rows.first] if is_new else rows.known[position]
                if there != (position, wanted):
                    name = rows.sequence.request.request_id
                    faults.append(f"{name}: {there} for {(position, wanted)}")
                found.append(wanted if there is None else there[1])
        return tuple(found[-WINDOW:])

    def close(self) -> None:
        if self.in_flight:
            self.device.faults.append("closed under a step in flight")
        self.device.synchronize()
        self.device.close()
        self.is_closed = True


class Late:
    """A PendingStep. behind: the one in flight at its launch; if that fails, nothing that this
    one finds is to be counted."""

    def __init__(
        self,
        runner: LateRunner,
        job: Job,
        sampled: list[Sequence],
        faults: list[str],
        behind: Late | None,
        read: tuple[list[PromptRowRequest], list[int]],
    ) -> None:
        """read: the rows that are wanted of prompts, and what all rows are followed by."""
        self._runner = runner
        self._job = job
        self._sampled = sampled
        self._faults = faults
        self._behind = behind
        self._wanted, self._seen = read
        self.late: frozenset[Sequence] = frozenset()

    def wait(self) -> StepResult:
        assert self._runner.in_flight.pop(0) is self, "in order"
        try:
            tokens = self._runner.device.wait(self._job)
        finally:
            is_void = self._behind is not None and self._behind._job.error is not None
            self._runner.device.faults += [] if is_void else self._faults
            self._behind = None
        logprobs = [TokenLogprobs(token, 0.0, (), 1) for token in tokens]
        return StepResult(self._sampled, tokens, [*logprobs], [*map(self._part, self._wanted)])

    def _part(self, wanted: PromptRowRequest) -> PromptPart:
        """Log-probabilities with what was seen as their rank; or its sum."""
        outputs, first, end, row = wanted
        values = self._seen[row : row + end - first]
        found: Any = np.array([sum(values)], dtype=np.float64)
        if isinstance(outputs, PromptScores):
            found = np.zeros(end - first, dtype=SAMPLED_ROW)
            found["token"], found["rank"] = outputs.token_ids[first + 1 : end + 1], values
        return PromptPart(outputs, first, end, found)


def check_prompt_rows(sequence: Sequence, num_tokens: int = 23) -> None:
    """All that was asked of its prompt is there, each row once."""
    prompt = sequence.request.prompt_token_ids
    right = [
        next_token(i, prompt[max(0, i + 1 - WINDOW) : i + 1], num_tokens)
        for i in range(len(prompt))
    ]
    outputs = sequence.prompt_outputs
    assert outputs is not None and outputs.is_complete, f"{sequence.request.request_id}"
    delta = TokenDelta(0, "", [])
    if isinstance(outputs, PromptScores):
        told = outputs.add_to(delta).prompt_logprobs
        assert told is not None and told[0] is None
        assert [(each.token_id, each.rank) for each in told if each is not None] == [
            *zip(prompt[1:], right, strict=False)
        ]
        return
    assert isinstance(outputs, Pooled)
    rows = right if outputs.params.kind == "mean" else right[-1:]
    vector = outputs.add_to(delta).embedding
    assert vector is not None and vector.tolist() == [np.float32(sum(rows) / len(rows))]
