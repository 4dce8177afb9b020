"""Pool 3's work: from sampled tokens to text deltas for the consumers.

One thread runs it, so the order of a sequence's deltas needs no lock. It never waits for a
consumer, because a sink buffers. What it decides (a stop string was found, a detokenizer failed)
goes back to the loop as a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve.engine.counters import RequestCounters
from serve.request import FinishReason, Request, TokenDelta, TokenLogprobs
from serve.sampling_params import TokenScores
from serve.scheduler.prompt_outputs import PromptOutputs
from serve.scheduler.sequence import Sequence
from serve.text.detokenizer import DetokenizerFactory, StopStrings

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives one request's results. The engine's threads call it, so it must not block."""

    def accept(self, request: Request) -> None:
        """Takes the tokenized and checked request, which goes to the scheduler."""

    def push(self, delta: TokenDelta) -> None:
        """Takes new text or tokens of one of the request's sequences, or its end."""

    def fail(self, error: Exception) -> None:
        """Takes the error with which the request was refused; no delta follows."""

    def wake(self) -> None:
        """Wakes the consumer after all deltas of a step were pushed."""


@dataclass(slots=True)
class StepRecord:
    """The results of a step: tokens[i] and logprobs[i] belong to sequences[i], which is there once
    for each of its tokens. finished: the sequences that ended, with or without a token. error: the
    error that ended them, if any."""

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finished: list[Sequence]
    now_s: float
    error: str | None = None


@dataclass(slots=True)
class RequestTimes:
    """Times and counts of one request, shared by its sequences. Pool 3 writes them; times are
    seconds on the engine's clock."""

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0


class OutputState:
    """The output state of one sequence. Only the thread of pool 3 uses it."""

    __slots__ = (
        "_detokenizer",
        "_emit",
        "_include_stop",
        "_min_output",
        "_prompt_rows",
        "_push_token",
        "_so_far",
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
        """prompt_rows: goes out with the first delta, if it is complete by then."""
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
        self.times = times
        self._prompt_rows = prompt_rows
        self._emit = sink.push if prompt_rows is None else self._emit_first
        so_far = params.answers_so_far
        self._so_far = so_far[index] if so_far and so_far[index].token_ids else None
        if self._so_far is not None:
            self._push_token = self._replay_and_push

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Adds a token and emits a delta; True when a stop string has ended the sequence."""
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

    def _replay_and_push(self, token_id: int) -> str:
        """Emits the tokens from before, and returns the text of the first new one."""
        self.num_output = 0  # the new token was counted
        self._replay()
        self.num_output += 1
        return self._push_token(token_id)

    def _replay(self) -> tuple[int, TokenLogprobs | None] | None:
        """Emits the tokens from before, but for the one that has ended the sequence, which is
        returned. Those with log-probabilities are emitted one by one, as they were at first."""
        assert self._so_far is not None
        tokens, has_ended = list(self._so_far.token_ids), self._so_far.finish_reason is not None
        scores = self._so_far.scores if self._wants_logprobs else ()
        logprobs = [TokenLogprobs(t, *_scored(s)) for t, s in zip(tokens, scores, strict=False)]
        self._so_far, self._push_token = None, self._detokenizer.push
        last = None
        if has_ended:
            last = tokens.pop(), logprobs.pop() if logprobs else None
        texts = []
        for token in tokens:
            self.num_output += 1
            text = self._push_token(token)
            if self._stops is not None and self._is_past_minimum():
                text, _ = self._stops.push(text)
            texts.append(text)
        if logprobs:
            for token, text, one in zip(tokens, texts, logprobs, strict=True):
                self.sink.push(TokenDelta(self.index, text, [token], [one], is_replayed=True))
        elif tokens:
            delta = TokenDelta(self.index, "".join(texts), tokens, is_replayed=True)
            self.sink.push(delta)
        return last

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
        """Emits the last delta: the final token, if there is one, and the text that was held
        back. Returns why the sequence ended, since a stop string may come with the last token."""
        self.is_done = True
        is_replayed = False
        if self._so_far is not None:
            last = self._replay()
            if last is not None:
                (token, logprobs), is_replayed = last, True
        self.num_output += token is not None
        text = ""
        # the model's own end-of-sequence token is not one of the client's stop tokens
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
        ended_by = found or stop_reason
        delta = TokenDelta(self.index, text, token_ids, kept, reason, ended_by, error)
        self._emit(delta._replace(is_replayed=True) if is_replayed else delta)
        return reason


class OutputProcessor:
    """Turns step records into deltas and counts them."""

    def __init__(
        self,
        on_end: Callable[[Sequence, FinishReason], None],
        counters: RequestCounters | None = None,
    ) -> None:
        """on_end: asks the loop to end a sequence whose stop string was found (STOP) or whose
        text cannot be made (ERROR)."""
        self._on_end = on_end
        self._counters = counters or RequestCounters()
        self._last_step_s = -1.0

    def process(self, record: StepRecord) -> None:
        """Pushes the record's deltas, then wakes the consumers. It never raises: an error in a
        detokenizer or in a sink ends only the sequence it belongs to."""
        sinks: dict[int, Sink] = {}
        last = _last_places(record) if record.finished else {}
        logprobs = record.logprobs
        now_s, last_step_s = record.now_s, self._last_step_s
        num_consecutive = 0  # sequences whose previous token came with the previous step
        for i, sequence in enumerate(record.sequences):
            state = sequence.output
            assert isinstance(state, OutputState)
            if state.is_done or (last and last.get(id(sequence)) == i):
                continue
            if state.last_token_s == last_step_s:
                num_consecutive += 1
            else:
                self._count_token(sequence, state, now_s)
            state.last_token_s = now_s
            try:
                if state.push(record.tokens[i], None if logprobs is None else logprobs[i]):
                    self._note_end(sequence, state.times, now_s)
                    self._count_end(sequence, state, FinishReason.STOP, now_s)
                    self._on_end(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(sequence, state, error, now_s)
            sinks[id(state.sink)] = state.sink
        if num_consecutive:  # one call for all of them: this is nearly every token
            self._counters.num_generation_tokens += num_consecutive
            self._counters.inter_token_s.observe(now_s - last_step_s, num_consecutive)
        if record.sequences:
            self._last_step_s = now_s
        if record.finished:
            self._finish_all(record, last, sinks)
        for sink in sinks.values():
            try:
                sink.wake()
            except Exception:
                logger.exception("a consumer cannot be woken")

    def _finish_all(self, record: StepRecord, last: dict[int, int], sinks: dict[int, Sink]) -> None:
        """last: the places of the last tokens of sequences that have some."""
        now_s = record.now_s
        for sequence in record.finished:
            state = sequence.output
            assert isinstance(state, OutputState)
            assert sequence.finish_reason is not None
            if state.is_done:
                continue
            i = last.get(id(sequence))
            if i is not None:
                self._count_token(sequence, state, now_s)
            elif sequence.is_prompt_only:
                self._count_prompt(sequence, state.times, now_s)
            self._note_end(sequence, state.times, now_s)
            try:
                reason = state.finish(
                    sequence.finish_reason,
                    token=None if i is None or sequence.error else record.tokens[i],
                    logprobs=record.logprobs[i] if i is not None and record.logprobs else None,
                    stop_token=sequence.stop_token,
                    error=record.error or sequence.error,
                )
                self._count_end(sequence, state, reason, now_s)
            except Exception as error:
                self._fail(sequence, state, error, now_s)
            sinks[id(state.sink)] = state.sink

    def _fail(self, sequence: Sequence, state: OutputState, error: Exception, now_s: float) -> None:
        """Ends only the sequence whose text could not be made or delivered."""
        logger.exception("post-processing of %s failed", sequence.request.request_id)
        state.is_done = True
        self._count_end(sequence, state, FinishReason.ERROR, now_s)
        message = f"post-processing failed: {type(error).__name__}"
        self._on_end(sequence, FinishReason.ERROR)
        delta = TokenDelta(state.index, "", [], None, FinishReason.ERROR, None, message)
        try:
            state.sink.push(delta)
        except Exception:
            logger.exception("the consumer of %s gets no delta", sequence.request.request_id)

    def _count_token(self, sequence: Sequence, state: OutputState, now_s: float) -> None:
        """Counts a token of a sequence that got none in the previous step."""
        self._counters.num_generation_tokens += 1
        if state.last_token_s is not None:
            self._counters.inter_token_s.observe(now_s - state.last_token_s)
            return
        state.first_token_s = now_s
        self._count_first(sequence, state.times, now_s)

    def _count_prompt(self, sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        """Counts a sequence that ends with its prompt, if the prompt was computed."""
        is_computed = sequence.first_scheduled_s is not None
        if is_computed and sequence.finish_reason is FinishReason.LENGTH:
            self._count_first(sequence, times, now_s)

    def _count_first(self, sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        """Counts a sequence's first token, or the end of its prompt if it gets no token."""
        request = sequence.request
        ttft_s = None if request.pooling is not None else now_s - request.arrival_s
        self._counters.count_first_token(sequence.index, sequence.num_prompt_tokens, ttft_s)
        if times.first_token_s is None:
            times.first_token_s = now_s
            times.first_scheduled_s = sequence.first_scheduled_s
            times.num_cached_tokens = sequence.num_cached_tokens

    def _count_end(
        self, sequence: Sequence, state: OutputState, reason: FinishReason, now_s: float
    ) -> None:
        request, counters = sequence.request, self._counters
        is_computed = request.params.max_tokens != 0 or sequence.prompt_outputs is not None
        if reason is FinishReason.LENGTH and not is_computed:
            return  # a client wanted to know the tokens of its prompt
        scheduled_s, first_s = sequence.first_scheduled_s, state.first_token_s
        times_s = request.arrival_s, scheduled_s, first_s, now_s
        counters.count_end(reason, state.num_output, times_s)
        if state.index == 0:
            params = request.params
            counters.count_request(sequence.num_prompt_tokens, params.max_tokens or 0, params.n)

    @staticmethod
    def _note_end(sequence: Sequence, times: RequestTimes, now_s: float) -> None:
        times.finished_s = now_s
        times.num_preemptions += sequence.num_preemptions


def _scored(scores: TokenScores) -> tuple[float, tuple[tuple[int, float], ...], int]:
    return scores.logprob, scores.top, scores.rank


def _last_places(record: StepRecord) -> dict[int, int]:
    """Returns where the last token of each ended sequence is; most end with a token."""
    ended = set(map(id, record.finished))
    return {id(s): i for i, s in enumerate(record.sequences) if id(s) in ended}
