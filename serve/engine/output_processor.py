"""Pool 3: sampled tokens -> text deltas for the consumers.

Runs in one thread, so the order of a sequence's deltas needs no lock. It never waits for a
consumer: a sink buffers. What it decides (a stop string was found, a detokenizer broke) goes
back to the compute loop as a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve.engine.counters import RequestCounters
from serve.request import FinishReason, Request, RequestMetrics, TokenDelta, TokenLogprobs
from serve.scheduler.prompt_outputs import PromptOutputs
from serve.scheduler.sequence import Sequence
from serve.text.detokenizer import DetokenizerFactory, StopStrings

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where one request's results go. Called from the engine's threads; must not block."""

    def accept(self, request: Request) -> None:
        """The request is tokenized, checked and queued."""

    def push(self, delta: TokenDelta) -> None:
        """One sequence gained something."""

    def fail(self, error: Exception) -> None:
        """The request was refused; nothing will be pushed."""

    def wake(self) -> None:
        """Everything of this step has been pushed; let the consumer look."""


@dataclass(slots=True)
class StepRecord:
    """What a step brought: tokens[i] for sequences[i]; finished ones, with or without a token."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finished: list[Sequence]
    now_s: float
    error: str | None = None


@dataclass(slots=True)
class RequestTimes:
    """Filled in as the request goes; shared by its sequences."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            self.arrival_s,
            self.first_scheduled_s,
            self.first_token_s,
            self.finished_s,
            self.num_preemptions,
            self.num_cached_tokens,
        )


class OutputState:
    """What pool 3 knows of one sequence. Only pool 3 touches it."""

    __slots__ = (
        "_detokenizer",
        "_emit",
        "_include_stop",
        "_min_output",
        "_prompt_rows",
        "_push_token",
        "_stop_ids",
        "_stops",
        "_wants_logprobs",
        "first_token_s",
        "index",
        "is_done",
        "last_token_s",
        "num_output",
        "sink",
        "times",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        detokenizers: DetokenizerFactory,
        sink: Sink,
        times: RequestTimes,
        prompt_rows: PromptOutputs | None = None,
    ) -> None:
        """prompt_rows: what the first delta is to bring, if it is complete by then."""
        params = request.params
        self._detokenizer = detokenizers.make(
            skip_special_tokens=params.skip_special_tokens, shown=params.shown_special_tokens
        )
        self._push_token = self._detokenizer.push
        self._include_stop = params.include_stop_str_in_output
        self._stop_ids = params.stop_ids
        stops = params.stop_strings
        self._stops = StopStrings(stops, include=self._include_stop) if stops else None
        self._min_output = params.min_tokens
        self._wants_logprobs = params.logprobs is not None
        self.index = index
        self.is_done = False
        self.num_output = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.sink = sink
        self._prompt_rows = prompt_rows
        self._emit = sink.push if prompt_rows is None else self._emit_first
        self.times = times

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """One more token; True when a stop string ended the sequence."""
        self.num_output += 1
        text = self._push_token(token)
        kept = None if logprobs is None or not self._wants_logprobs else [logprobs]
        if self._stops is not None and self._is_past_minimum():
            text, found = self._stops.push(text)
            if found is not None:
                self.is_done = True
                delta = TokenDelta(self.index, text, [token], kept, FinishReason.STOP, found)
                self._emit(delta)
                return True
        self._emit(TokenDelta(self.index, text, [token], kept))
        return False

    def _emit_first(self, delta: TokenDelta) -> None:
        rows, self._prompt_rows = self._prompt_rows, None
        self._emit = self.sink.push
        self._emit(rows.add_to(delta) if rows is not None and rows.is_complete else delta)

    def _is_past_minimum(self) -> bool:
        return self.num_output > self._min_output

    def finish(
        self,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> FinishReason:
        """The last delta: the final token if there is one, and whatever text was held back.
        Returns why it ended: a stop string may come with the last token."""
        self.is_done = True
        self.num_output += token is not None
        text = ""
        # the model's own end is no reason that the client gave
        stop_reason = stop_token if stop_token in self._stop_ids else None
        token_ids = [] if token is None else [token]
        found: str | None = None
        if token is not None and (stop_token is None or self._include_stop):
            text = self._push_token(token)
        text += self._detokenizer.finish()
        if self._stops is not None:
            if token is not None and self._is_past_minimum():
                text, found = self._stops.push(text)
            else:
                text = self._stops.finish() + text
            text += self._stops.finish()
        kept = [logprobs] if logprobs is not None and self._wants_logprobs else None
        if found is not None:
            reason = FinishReason.STOP
        self._emit(
            TokenDelta(self.index, text, token_ids, kept, reason, found or stop_reason, error)
        )
        return reason


class OutputProcessor:
    """Turns step records into deltas. on_end(sequence, reason): end it, its stop string has come
    (STOP) or its text cannot be made (ERROR)."""

    def __init__(
        self,
        on_end: Callable[[Sequence, FinishReason], None],
        counters: RequestCounters | None = None,
    ) -> None:
        self._on_end = on_end
        self._counters = counters or RequestCounters()
        self._last_s = -1.0  # of the step before

    def process(self, record: StepRecord) -> None:
        """Push the record's deltas, then wake the consumers. Never raises: a fault, be it of a
        detokenizer or of a sink, ends the sequence it belongs to."""
        touched: dict[int, Sink] = {}
        ended = set(map(id, record.finished)) if record.finished else ()
        logprobs = record.logprobs
        now_s, last_s = record.now_s, self._last_s
        num_usual = 0  # whose last token came with the step before
        for i, sequence in enumerate(record.sequences):
            state = sequence.output
            assert isinstance(state, OutputState)
            if state.is_done or (ended and id(sequence) in ended):
                continue
            if state.last_token_s == last_s:
                num_usual += 1
            else:
                self._note_token(sequence, state, now_s)
            state.last_token_s = now_s
            try:
                if state.push(record.tokens[i], None if logprobs is None else logprobs[i]):
                    self._note_end(sequence, state.times, now_s)
                    self._ended(sequence, state, FinishReason.STOP, now_s)
                    self._on_end(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(sequence, state, error, record.now_s)
            touched[id(state.sink)] = state.sink
        if num_usual:
            self._counters.num_generation_tokens += num_usual
            self._counters.inter_token_s.observe(now_s - last_s, num_usual)
        if record.sequences:
            self._last_s = now_s
        if record.finished:
            self._finish_all(record, touched)
        for sink in touched.values():
            try:
                sink.wake()
            except Exception:
                logger.exception("a consumer cannot be woken")

    def _finish_all(self, record: StepRecord, touched: dict[int, Sink]) -> None:
        last = {id(s): i for i, s in enumerate(record.sequences)}
        for sequence in record.finished:
            state = sequence.output
            assert isinstance(state, OutputState)
            assert sequence.finish_reason is not None
            if state.is_done:
                continue
            i = last.get(id(sequence))
            if i is not None:
                self._note_token(sequence, state, record.now_s)
            elif sequence.is_prompt_only:
                self._note_prompt(sequence, state.times, record.now_s)
            self._note_end(sequence, state.times, record.now_s)
            stop_token = sequence.stop_token
            try:
                reason = state.finish(
                    sequence.finish_reason,
                    token=None if i is None or sequence.error else record.tokens[i],
                    logprobs=record.logprobs[i] if i is not None and record.logprobs else None,
                    stop_token=stop_token,
                    error=record.error or sequence.error,
                )
                self._ended(sequence, state, reason, record.now_s)
            except Exception as error:
                self._fail(sequence, state, error, record.now_s)
            touched[id(state.sink)] = state.sink

    def _fail(self, sequence: Sequence, state: OutputState, error: Exception, now_s: float) -> None:
        """A fault in one request's post-processing ends only that sequence."""
        logger.exception("post-processing of %s failed", sequence.request.request_id)
        state.is_done = True
        self._ended(sequence, state, FinishReason.ERROR, now_s)
        message = f"post-processing failed: {type(error).__name__}"
        self._on_end(sequence, FinishReason.ERROR)
        delta = TokenDelta(state.index, "", [], None, FinishReason.ERROR, None, message)
        try:
            state.sink.push(delta)
        except Exception:
            logger.exception("the consumer of %s cannot be told", sequence.request.request_id)

    def _note_token(self, sequence: Sequence, state: OutputState, now_s: float) -> None:
        """One whose last token did not come with the step before."""
        self._counters.num_generation_tokens += 1
        if state.last_token_s is not None:
            self._counters.inter_token_s.observe(now_s - state.last_token_s)
            return
        state.first_token_s = now_s
        times = state.times
        self._counters.count_first_token(
            state.index, sequence.num_prompt_tokens, now_s - times.arrival_s
        )
        if times.first_token_s is None:
            self._note_first(sequence, times, now_s)

    def _note_prompt(self, sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        """All that there is of it is here, if it was computed and not aborted."""
        is_computed = sequence.first_scheduled_s is not None
        if not (is_computed and sequence.finish_reason is FinishReason.LENGTH):
            return
        self._counters.count_first_token(
            sequence.index, sequence.num_prompt_tokens, now_s - times.arrival_s
        )
        if times.first_token_s is None:
            self._note_first(sequence, times, now_s)

    def _ended(
        self, sequence: Sequence, state: OutputState, reason: FinishReason, now_s: float
    ) -> None:
        counters, times = self._counters, state.times
        scheduled_s, first_s = sequence.first_scheduled_s, state.first_token_s
        counters.count_end(reason, state.num_output, (times.arrival_s, scheduled_s, first_s, now_s))
        if state.index == 0:
            params = sequence.request.params
            counters.count_request(sequence.num_prompt_tokens, params.max_tokens or 0, params.n)

    @staticmethod
    def _note_first(sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        times.first_token_s = now_s
        times.first_scheduled_s = sequence.first_scheduled_s
        times.num_cached_tokens = sequence.num_cached_tokens

    @staticmethod
    def _note_end(sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        times.finished_s = now_s
        times.num_preemptions += sequence.num_preemptions
