"""An overlapping runner on a device that computes later than it is asked to.

Its K/V is (position, token) for every position of every page, written and read in the order of the
steps through the page tables at the time a step runs. A token is a function of what its row reads
there, so a wrong input, a wrong position, a stale range or a page that was released too early
changes it. Most of these are also detected at once (`LateDevice.faults`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from tests.support.cuda.late_device import Job, LateDevice, LateMemory, PipelineMemory
from tests.support.cuda.late_states import advance

WINDOW = 8  # number of tokens that determine the next one
EOS = 5
GARBAGE = 77_777


def next_token(position: int, recent: tuple[int, ...], num_tokens: int = 23) -> int:
    """Returns the token, from 3 on, that follows `recent`, the last WINDOW tokens up to
    `position`."""
    value = position + 1
    for token in recent:
        value = (value * 1_000_003 + token + 17) % 2_147_483_647
    return 3 + value % num_tokens


def expected_tokens(sequence: Sequence, num_tokens: int = 23) -> list[int]:
    """Returns the prompt and output of an uninterrupted run."""
    tokens = list(sequence.request.prompt_token_ids)
    while len(tokens) < sequence.max_tokens_total:
        tokens.append(next_token(len(tokens) - 1, tuple(tokens[-WINDOW:]), num_tokens))
        if tokens[-1] in sequence.stop_ids and len(tokens) > sequence.min_tokens_total:
            break
    return tokens


@dataclass(slots=True)
class Rows:
    """Rows of one sequence in a step, as noted at the launch. first: their first position;
    tokens: their inputs; history: all tokens before them, which the host knows."""

    sequence: Sequence
    target: Range
    first: int
    tokens: list[int]
    history: list[int]
    samples: bool


class LateRunner:
    """fails_launch, fails_wait: whether a sequence's launch or step raises. needs: whether a
    sequence's tokens must be known before its launch. is_late: whether the mask of a sequence is
    not ready when its step was computed. host_s, row_s: seconds of a launch on the host, and of a
    row in each stage of the device. memory: the page tables that count; None: those of the
    accounting at the launch."""

    def __init__(
        self,
        kv: KVManager,
        device: LateDevice,
        memory: LateMemory | None = None,
        *,
        depth: int = 2,
        tokens_on_device: bool = True,
        num_tokens: int = 23,
        host_s: float = 0.0,
        row_s: float = 0.0,
        fails_launch: Callable[[Sequence], bool] = lambda s: False,
        fails_wait: Callable[[Sequence], bool] = lambda s: False,
        needs: Callable[[Sequence], bool] = lambda s: False,
        is_late: Callable[[Sequence], bool] = lambda s: False,
    ) -> None:
        assert tokens_on_device or isinstance(memory, PipelineMemory | None)
        self.depth = depth
        self.tokens_on_device = tokens_on_device
        self.kv = kv
        self.device = device
        self.memory = memory
        self.num_tokens = num_tokens
        self.host_s = host_s
        self.row_s = row_s
        self.fails_launch = fails_launch
        self.fails_wait = fails_wait
        self.needs = needs
        self.is_late = is_late
        self.last: dict[int, int] = {}  # last sampled token by range, on the device
        self.content: dict[int, dict[int, tuple[int, int]]] = (
            {} if memory is None else memory.content  # type: ignore[assignment]
        )
        self.in_flight: list[Late] = []
        self.num_pending = 0  # inputs that were pending at the launch
        self.is_closed = False

    def check(self) -> None:
        """The device works again after every failure."""

    def needs_tokens(self, plan: StepPlan) -> bool:
        return any(self.needs(sequence) for sequence in plan.sequences)

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        assert not self.in_flight, "another step is in flight"
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
        assert not (self.in_flight and self.needs_tokens(plan)), "tokens are pending"
        assert len(self.in_flight) < self.depth
        if not self.tokens_on_device:
            for late in self.in_flight:
                assert not set(late.sampled) & set(plan.sequences), "its token is not known"
        page_tables = [self._tables(rows.target) for rows in step] if self.memory is None else None
        is_bad = any(self.fails_wait(rows.sequence) for rows in step)
        faults: list[str] = []
        seen: list[int] = []
        edits = [] if self.memory is None else self.memory.take_edits()

        def work() -> list[int]:
            for edit in edits:
                edit()
            return self._compute(step, page_tables, is_bad, faults, seen)

        job = self.device.submit(work, self.row_s * plan.num_total_rows)
        sampled = [rows.sequence for rows in step if rows.samples]
        behind = self.in_flight[-1] if self.in_flight else None
        read = prompt_row_requests(plan), seen
        late = Late(self, job, plan.sequences[:], sampled, faults, behind, read)
        self.in_flight.append(late)
        launched()
        return late

    def _rows(self, sequence: Sequence, count: int, samples: bool) -> Rows:
        assert sequence.kv_range is not None
        first = sequence.num_computed_tokens
        tokens = sequence.token_ids[first : first + count]
        assert len(tokens) == count and sequence.kv_range.capacity >= first + count
        assert PENDING_TOKEN not in tokens[:-1], "only the last token can be pending"
        num_before = self.depth - 2 if self.tokens_on_device else 0
        assert PENDING_TOKEN not in sequence.token_ids[: max(0, first - num_before)]
        assert self.tokens_on_device or tokens[-1] != PENDING_TOKEN
        self.num_pending += tokens[-1] == PENDING_TOKEN
        history = sequence.token_ids[:first]
        return Rows(sequence, sequence.kv_range, first, tokens, history, samples)

    # ---- on the device

    def _compute(
        self,
        step: list[Rows],
        page_tables: list[list[list[int]]] | None,
        is_bad: bool,
        faults: list[str],
        seen: list[int],
    ) -> list[int]:
        """Runs the step and returns its sampled tokens. seen: gets the token that follows each
        row."""
        sampled: list[int] = []
        for number, rows in enumerate(step):
            tables = self._mapped(rows.target) if page_tables is None else page_tables[number]
            if rows.tokens[-1] == PENDING_TOKEN:
                rows.tokens[-1] = self.last[rows.target.start]
            self._advance(rows, tables, faults)
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
        """Returns the pages in the range's page slots now, -1 for unmapped ones."""
        assert self.memory is not None
        kv, tables = self.kv, []
        for number, part in enumerate(target.parts):
            start = kv.group_offset(number) + target.index * kv.range_tokens * (
                part.group.token_bytes
            )
            slots = range(part.group.slots_for(kv.max_model_len))
            mapped = self.memory.mapped_for_step
            tables.append([mapped.get(start + slot * kv.page_bytes, -1) for slot in slots])
        return tables

    def _advance(self, rows: Rows, tables: list[list[int]], faults: list[str]) -> None:
        """Applies the rows to the sequence's state, of groups that have one."""
        for part, table in zip(rows.target.parts, tables, strict=True):
            if part.group.is_state:
                faults += advance(part, table, self.content, rows.first, rows.tokens, rows.history)

    def _write(
        self, rows: Rows, tables: list[list[int]], position: int, token: int, faults: list[str]
    ) -> None:
        for part, table in zip(rows.target.parts, tables, strict=True):
            if part.group.is_state:
                continue
            slot, offset = divmod(position, part.group.tokens_in(1))
            if table[slot] < 0:
                faults.append(f"position {position} has no page")
                continue
            self.content.setdefault(table[slot], {})[offset] = (position, token)

    def _read(
        self, rows: Rows, tables: list[list[int]], last: int, faults: list[str]
    ) -> tuple[int, ...]:
        """Returns the last tokens up to a position and checks all positions that its attention
        reads."""
        found: list[int] = []
        for part, table in zip(rows.target.parts, tables, strict=True):
            if part.group.is_state:
                continue
            window = part.group.window or last + 1
            found = []
            for position in range(max(0, last + 1 - window), last + 1):
                slot, offset = divmod(position, part.group.tokens_in(1))
                stored = self.content.get(table[slot], {}).get(offset)
                is_new = position >= rows.first
                expected = rows.tokens[position - rows.first] if is_new else rows.history[position]
                if expected == PENDING_TOKEN and stored is not None:
                    expected = stored[1]  # only an earlier step in flight knew it at the launch
                if stored != (position, expected):
                    name = rows.sequence.request.request_id
                    faults.append(f"{name}: {stored} for {(position, expected)}")
                found.append(expected if stored is None else stored[1])
        return tuple(found[-WINDOW:])

    def close(self) -> None:
        if self.in_flight:
            self.device.faults.append("closed under a step in flight")
        self.device.synchronize()
        self.device.close()
        self.is_closed = True


class Late:
    """A PendingStep. behind: the last step in flight at its launch; if that or an earlier one
    fails, this one's faults do not count (is_void)."""

    def __init__(
        self,
        runner: LateRunner,
        job: Job,
        sequences: list[Sequence],
        sampled: list[Sequence],
        faults: list[str],
        behind: Late | None,
        read: tuple[list[PromptRowRequest], list[int]],
    ) -> None:
        """read: the requested prompt rows, and the tokens that follow all rows."""
        self._runner = runner
        self._job = job
        self.sequences = sequences
        self.sampled = sampled
        self._faults = faults
        self._behind = behind
        self._requests, self._seen = read
        self.is_void = False
        self.late: frozenset[Sequence] = frozenset()

    def wait(self) -> StepResult:
        assert self._runner.in_flight.pop(0) is self, "steps complete in order"
        try:
            tokens = self._runner.device.wait(self._job)
        finally:
            behind, self._behind = self._behind, None
            if behind is not None:
                self.is_void = behind.is_void or behind._job.error is not None
            self._runner.device.faults += [] if self.is_void else self._faults
        logprobs = [TokenLogprobs(token, 0.0, (), 1) for token in tokens]
        parts = [*map(self._part, self._requests)]
        result = StepResult(self.sampled, tokens, [*logprobs], parts)
        if self._runner.tokens_on_device:
            return result
        assert not any(PENDING_TOKEN in s.token_ids for s in self.sampled), "not as launched"
        late = frozenset(s for s in self.sampled if self._runner.is_late(s))
        return result.without(late)._replace(late=late)

    def _part(self, request: PromptRowRequest) -> PromptPart:
        """Returns log-probabilities with the seen tokens as their rank, or the sum of the seen
        tokens."""
        outputs, first, end, row = request
        values = self._seen[row : row + end - first]
        found: Any = np.array([sum(values)], dtype=np.float64)
        if isinstance(outputs, PromptScores):
            found = np.zeros(end - first, dtype=SAMPLED_ROW)
            found["token"], found["rank"] = outputs.token_ids[first + 1 : end + 1], values
        return PromptPart(outputs, first, end, found)


def check_prompt_rows(sequence: Sequence, num_tokens: int = 23) -> None:
    """Checks that all requested prompt outputs are there, each row once."""
    prompt = sequence.request.prompt_token_ids
    right = [
        next_token(i, prompt[max(0, i + 1 - WINDOW) : i + 1], num_tokens)
        for i in range(len(prompt))
    ]
    outputs = sequence.prompt_outputs
    assert outputs is not None and outputs.is_complete, f"{sequence.request.request_id}"
    delta = TokenDelta(0, "", [])
    if isinstance(outputs, PromptScores):
        reported = outputs.add_to(delta).prompt_logprobs
        assert reported is not None and reported[0] is None
        assert [(each.token_id, each.rank) for each in reported if each is not None] == [
            *zip(prompt[1:], right, strict=False)
        ]
        return
    assert isinstance(outputs, Pooled)
    rows = right if outputs.params.kind == "mean" else right[-1:]
    vector = outputs.add_to(delta).embedding
    assert vector is not None and vector.tolist() == [np.float32(sum(rows) / len(rows))]
