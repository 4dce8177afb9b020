"""Records a simulated run: all of a short one, and a sample of a long one to limit memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter

from bench.load.client.record import Outcome, Record, ServerSample, StepRow
from bench.simulate.engine import Step
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence

MOST_CHUNKS = 2_000_000  # a run with more keeps only the first and last times
MOST_STEPS = 20_000
MOST_SAMPLES = 1_000
_BIN = math.log(1.01)


class RunRecorder:
    """Keeps the times of requests by their number. With keeps_chunks it keeps the times of all
    tokens, else only of the first and the last one."""

    def __init__(self, scheduler: Scheduler, num_calls: int, *, keeps_chunks: bool) -> None:
        self.keeps_chunks = keeps_chunks
        self.num_steps = 0
        self.num_preempted = 0
        self.rows: list[StepRow] = []
        self._scheduler = scheduler
        self.stride = 1  # every stride-th step is kept
        self._gaps: Counter[int] = Counter()
        self._chunks: dict[int, list[float]] = {}
        self._first_s = array("d", bytes(8 * num_calls))
        self._last_s = array("d", bytes(8 * num_calls))
        self._queue_s = array("d", bytes(8 * num_calls))
        self._num_output = array("l", bytes(8 * num_calls))
        self._num_cached = array("l", bytes(8 * num_calls))
        self._reasons = bytearray(num_calls)  # 0: not finished, 1: stop, 2: length
        self._num_preemptions = 0
        self._stopped_s: dict[Sequence, float] = {}  # end of the last step before a preemption

    def watch(self, step: Step) -> None:
        """Records a step that has run."""
        scheduler = self._scheduler
        if self.num_steps % self.stride == 0:
            self._keep_step(step)
        self.num_steps += 1
        for sequence in step.firsts:
            self._first_s[number_of(sequence)] = step.ended_s
        if self.keeps_chunks:
            for sequence in step.sampled:
                self._chunks.setdefault(number_of(sequence), []).append(step.ended_s)
            return
        if scheduler.num_preemptions != self._num_preemptions:
            self._num_preemptions = scheduler.num_preemptions
            for sequence in scheduler.waiting:
                if sequence.num_preemptions and sequence.num_output_tokens:
                    self._stopped_s.setdefault(sequence, step.began_s)
        num_steady = len(step.sampled) - len(step.firsts)
        if self._stopped_s:
            num_steady -= self._count_resumed(step)
        if num_steady:
            self._gaps[_bin(step.seconds)] += num_steady

    def _count_resumed(self, step: Step) -> int:
        resumed = [s for s in step.sampled if s in self._stopped_s]
        for sequence in resumed:
            self._gaps[_bin(step.ended_s - self._stopped_s.pop(sequence))] += 1
        return len(resumed)

    def _keep_step(self, step: Step) -> None:
        work, scheduler = step.work, self._scheduler
        self.rows.append(
            StepRow(
                step.began_s,
                step.ended_s,
                work.num_decodes,
                work.num_rows - work.num_decodes,
                work.num_chunks,
                work.num_context,
                work.num_pairs,
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.kv.num_in_use,
            )
        )
        if len(self.rows) >= 2 * MOST_STEPS:
            del self.rows[1::2]
            self.stride *= 2

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Records that a sequence finished at now_s."""
        number = number_of(sequence)
        self._last_s[number] = now_s
        assert sequence.first_scheduled_s is not None, "the sequence has run"
        self._queue_s[number] = sequence.first_scheduled_s - sequence.request.arrival_s
        self._num_output[number] = sequence.num_output_tokens
        self._num_cached[number] = sequence.num_cached_tokens
        self._reasons[number] = 1 if sequence.finish_reason is FinishReason.STOP else 2
        self.num_preempted += sequence.num_preemptions > 0

    def fill(self, record: Record, output_s: float) -> None:
        """Fills in a request's record. output_s is the delay from a step's end to the client."""
        number = record.index
        if not self._reasons[number]:
            return
        record.finished_s = self._last_s[number] + output_s
        record.output_tokens = count = self._num_output[number]
        record.cached_tokens = self._num_cached[number]
        record.queue_s = self._queue_s[number]
        record.outcome = Outcome.OK
        record.finish_reason = "stop" if self._reasons[number] == 1 else "length"
        if self.keeps_chunks:
            record.chunks_s = [at_s + output_s for at_s in self._chunks[number]]
            record.chunk_tokens = [1] * count
            return
        record.chunks_s = [self._first_s[number] + output_s]
        if count > 1:
            record.chunks_s.append(record.finished_s)
        record.num_chunks = count

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """Pairs (seconds between tokens, count) of a run that does not keep all times."""
        return [
            (math.exp((number + 0.5) * _BIN), count) for number, count in sorted(self._gaps.items())
        ]

    def samples(self) -> list[ServerSample]:
        """Returns the samples that a server would report when polled."""
        num_pages = self._scheduler.kv.num_pages
        every = -(-len(self.rows) // MOST_SAMPLES) or 1
        return [
            ServerSample(row.end_s, row.num_running, row.num_waiting, row.pages_in_use / num_pages)
            for row in self.rows[::every]
        ]


def number_of(sequence: Sequence) -> int:
    """Returns the number of a sequence's call."""
    return int(sequence.request.request_id)


def _bin(seconds: float) -> int:
    return math.floor(math.log(seconds) / _BIN)
