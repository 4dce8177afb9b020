"""The engine's core: three thread pools, the loop, and the messages between them.

    callers   submit, abort                          any thread
    pool 1    tokenize, check, compile grammars      N threads
    pool 2    the loop: schedule, run, update        one thread, which owns the scheduler, the
                                                     K/V manager and the device
    pool 3    detokenize, find stop strings, deliver one thread

A request goes from pool 1 to the loop as a message: a callable in the loop's inbox, which runs
between two steps. A step's tokens go from the loop to pool 3 as a StepRecord, while the next step
is on the device. So the loop's state needs no lock, and between two steps the compute thread does
only the loop's own work. The asyncio interface (engine.py) and the offline one (llm.py) use it.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from memory.kv_memory import KVMemory
from serve.engine.core_view import CoreView
from serve.engine.counters import RequestCounters
from serve.engine.early_rejection import EarlyRejection
from serve.engine.node_recovery import MakeRecovery, Recovery
from serve.engine.output_processor import OutputProcessor, Sink, StepRecord
from serve.engine.overlapped_executor import make_executor
from serve.engine.pools import ComputeThread, OutputThread, PromptPool
from serve.engine.preprocessor import Encode, PreparedRequest, Preprocessor, prepare_sequences
from serve.engine.request_limits import RequestLimits
from serve.engine.request_table import RequestState, RequestTable
from serve.engine.stats import EngineStats, engine_stats
from serve.engine.watchdog import Watchdog
from serve.errors import EngineStoppedError, GenerationError
from serve.pooling import PoolingParams
from serve.request import FinishReason, Prompt
from serve.runner.runner import Runner
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.text.detokenizer import DetokenizerFactory
from serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_IDLE_TRIM_S = 0.5  # an idle engine gives unused pages back to the system after this time
_WRITE_WAIT_S = 0.05  # between batches of pages that an idle engine writes to the disk
_NO_MEMORY_WAIT_S = 0.02  # between two checks for memory nodes while none is available
_STEP_END_S = 2.0  # a stopping engine waits this long for the last step before it interrupts it
_FETCH_WAIT_S = 0.02  # longest wait for fetched pages before the inbox is looked at again
# How long a thread may hold the interpreter while another waits for it. With the default of
# 5 ms, pool 3 and HTTP would delay the compute thread after every operator.
_SWITCH_INTERVAL_S = 2e-4


class EngineCore:
    """Threads, queues and the loop of one engine."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        kv: KVMemory,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        limits: RequestLimits,
        compute: ComputeThread,
        make_recovery: MakeRecovery | None = None,
        tokenize_threads: int = 2,
        tokenize: Executor | None = None,
        make_output: Callable[[OutputProcessor], OutputThread] = OutputThread,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compute: pool 2; the loop will run in it. make_recovery: makes what recovers K/V
        that memory nodes or other ranks hold. tokenize: replaces the threads of pool 1.
        make_output: makes pool 3. seed: requests without a seed derive theirs from it."""
        self._runner = runner
        self._scheduler = scheduler
        self.kv = kv  # other threads may read only its sizes
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._eos = eos_token_ids
        self._clock = clock
        self._rejection = EarlyRejection.of(scheduler, limits.ttft_slo_s)
        recovery = make_recovery and make_recovery(scheduler, self._end_sequence)
        self._recovery: Recovery | None = recovery
        self._preprocessor = Preprocessor(
            tokenizer, limits, scheduler.prefixes, self._rejection, self._eos, seed
        )
        self._requests = RequestTable(limits)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop_future: Future[None] | None = None
        self.has_failed = False  # an error ended the loop: no request is accepted any more
        self._prompt_pool = PromptPool(tokenize_threads, tokenize)
        self._compute = compute
        counters = RequestCounters()
        self._output = make_output(OutputProcessor(self._post_end, counters))
        self._executor = make_executor(
            runner,
            scheduler,
            self._output,
            end_sequence=self._end_sequence,
            on_finished=self._remove_ended,
            on_nodes_lost=None if self._recovery is None else self._recovery.handle_loss,
            clock=clock,
        )
        self.watchdog = Watchdog(time.monotonic, self._output.is_alive)
        self.view = CoreView(
            scheduler,
            self._executor,
            counters,
            self._prompt_pool.counters,
            self._inbox.qsize,
            self._output,
            self._preprocessor.masks,
            self._rejection,
        )

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._loop_future = self._compute.submit(self._run_loop)
        self._output.start()

    # ---- any thread

    def submit(
        self,
        prompt: Prompt | Encode,
        params: SamplingParams | PoolingParams,
        sink: Sink,
        request_id: str | None = None,
        client: str | None = None,
        arrived_s: float | None = None,
        num_chars: int = 0,
    ) -> RequestState:
        """Queues a request for pool 1; its sink receives all results and errors. `prompt` may be a
        function that returns the token ids; num_chars is the size of the text that it encodes.
        Raises RequestError for an id that is in use, OverloadedError and EngineStoppedError."""
        now_s = self._clock() if arrived_s is None else arrived_s
        state = self._preprocessor.make_state(prompt, params, sink, now_s, request_id, client)
        compiles = self._preprocessor.masks.is_slow(state.request.params)
        is_large = self._preprocessor.is_large(prompt, num_chars, params)
        job = partial(self._prepare, state, prompt)
        submit = partial(self._prompt_pool.submit, job, compiles=compiles, is_large=is_large)
        self._requests.add(state, submit)
        return state

    def check_grammar_queue(self, params: SamplingParams) -> None:
        """Raises OverloadedError, as `submit` does not, if too many wait for a new grammar."""
        if self._preprocessor.masks.is_slow(params):
            self._prompt_pool.check_compile_queue()

    def abort(self, state: RequestState) -> None:
        """Ends a request; its memory is free at the next step. Does nothing if it has ended."""
        state.is_aborted = True
        self._inbox.put(lambda: self._abort(state))

    def run_in_loop(self, job: Callable[[], None]) -> None:
        """Runs a job in the loop's thread, between two steps."""
        self._inbox.put(job)

    def num_unfinished(self) -> int:
        return len(self._requests)

    def stats(self) -> EngineStats:
        return engine_stats(
            self._scheduler,
            self._rejection,
            self._recovery,
            self._executor.counts,
            num_unfinished=len(self._requests),
            clock=self._clock,
        )

    # ---- pool 1

    def _prepare(self, state: RequestState, prompt: Prompt | Encode) -> None:
        """Tokenizes and checks a request, then sends it to the loop or refuses it."""
        try:
            prepared = self._preprocessor.prepare(state, prompt)
        except Exception as error:
            self._refuse(state, error)
        else:
            state.notify_sink(lambda: state.sink.accept(prepared.request))
            self._inbox.put(lambda: self._enqueue(state, prepared))

    def _refuse(self, state: RequestState, error: Exception) -> None:
        self._requests.remove(state)
        state.notify_sink(lambda: state.sink.fail(error))

    # ---- pool 2: the loop

    def _run_loop(self) -> None:
        try:
            while self._handle_messages():
                self._step()
            self._drain_inbox()
        except BaseException:
            logger.exception("the compute loop failed; no new requests are accepted")
            self.has_failed = True
            self._requests.close()
            self._fail_until_shutdown()
        finally:
            self._end_all(FinishReason.ABORT)
            for state in self._requests.states():  # so that no client waits for ever
                self._refuse(state, EngineStoppedError("the engine has stopped"))
            self._executor.abandon()
            self._close_memory()

    def _handle_messages(self) -> bool:
        """Runs the messages of the inbox. If there is nothing to compute, it waits for a message
        and does idle work in the meantime. Returns False when the engine is to stop."""
        timeout_s: float | None = _IDLE_TRIM_S
        while True:
            is_idle = not self._scheduler.has_work()
            if is_idle:
                self._executor.drain()
                self._executor.pause()
                self.watchdog.rest()
            try:
                message = self._inbox.get(is_idle, timeout_s)
            except queue.Empty:
                if not is_idle:
                    return True
                self.watchdog.begin()
                timeout_s = self._do_idle_work()
                continue
            self.watchdog.begin()
            if message is None:
                return False
            message()

    def _do_idle_work(self) -> float | None:
        """Polls memory nodes, gives unused pages back and writes some pages to the disk. Returns
        the seconds until there is more to do; None if there is no more."""
        if self._recovery is not None:
            self._recovery.update_nodes()
        self.kv.trim()
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.trim()
        if self.kv.prefixes.write_unwritten():
            return _WRITE_WAIT_S
        return None if self._recovery is None else _IDLE_TRIM_S

    def _step(self) -> None:
        """Schedules a step and runs it; the executor then updates the scheduler and hands the
        tokens to pool 3."""
        now_s = self._clock()
        if self._recovery is not None and not self._recovery.update_nodes():
            if not self._executor.complete_oldest():
                self._executor.pause()
                self._wait_for_memory()
            return
        plan = self._scheduler.schedule(now_s)
        if plan is not None:
            self.watchdog.begin(plan.num_total_rows, plan.num_decodes)
            self._executor.run(plan, now_s)
            return
        self.watchdog.begin()
        if not self._executor.complete_oldest():  # it may free memory, or bring awaited tokens
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Waits because no sequence can be scheduled and no step is in flight."""
        if self.kv.prefixes.is_transferring:
            # The next waiting sequence waits for pages being loaded, or for pages being written.
            self._executor.pause()
            self.kv.prefixes.wait(_FETCH_WAIT_S)
        elif not self._scheduler.running:
            # Start-up has checked that one sequence fits; after the loss of nodes it may not.
            is_short = self._recovery is not None and self._recovery.is_short
            assert is_short, "work, but nothing can be scheduled"
            self._executor.pause()
            self._wait_for_memory()

    def _wait_for_memory(self) -> None:
        time.sleep(_NO_MEMORY_WAIT_S)

    # ---- pool 2: messages

    def _enqueue(self, state: RequestState, prepared: PreparedRequest) -> None:
        """Makes a request's sequences and queues them; an error here ends that request only."""
        try:
            if self._rejection is not None and prepared.prefill_s is not None:
                self._rejection.mark_queued(prepared.prefill_s)
            shares_prefix = self._scheduler.prefixes.is_on
            state.sequences = sequences = prepare_sequences(
                state, prepared, self._eos, self._detokenizers, shares_prefix=shares_prefix
            )
            params = prepared.request.params
            has_work = params.max_tokens != 0 or sequences[0].prompt_outputs is not None
            reason = FinishReason.ABORT if state.is_aborted else FinishReason.LENGTH
            for sequence in sequences:
                if has_work and not (state.is_aborted or sequence.is_finished):
                    self._scheduler.add(sequence)
                elif not sequence.is_finished:
                    sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            if ended := [s for s in sequences if s.is_finished]:
                self._deliver_end(ended)
        except Exception:
            logger.exception("queueing %s failed", state.request_id)
            self._refuse(state, GenerationError("the engine failed to queue the request"))

    def _abort(self, state: RequestState) -> None:
        ended = [s for s in state.sequences if self._scheduler.finish(s, FinishReason.ABORT)]
        if ended:
            self._deliver_end(ended)

    def _post_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Asks the loop to end a sequence, on behalf of pool 3."""
        self._inbox.put(lambda: self._end_sequence(sequence, reason))

    def _end_sequence(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> None:
        """Ends a sequence early (abort, stop string, error); does nothing if it has ended."""
        if self._scheduler.finish(sequence, reason):
            self._deliver_end([sequence], error)

    def _deliver_end(self, sequences: list[Sequence], error: str | None = None) -> None:
        """Sends pool 3 the sequences that ended for another reason than a step's result."""
        self._output.add(StepRecord([], [], None, sequences, self._clock(), error))
        self._remove_ended(sequences)

    def _remove_ended(self, ended: list[Sequence]) -> None:
        """Removes the requests whose last sequence is among these from the table."""
        for request_id in {s.request.request_id for s in ended}:
            state = self._requests.get(request_id)
            if state is not None and all(s.is_finished for s in state.sequences):
                self._requests.remove(state)

    # ---- pool 2: the end of the loop

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            if (message := self._inbox.get()) is not None:
                message()

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends every sequence; an error in the scheduler's state does not stop it."""
        try:
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._end_sequence(sequence, reason, error)
        except Exception:
            logger.exception("ending the sequences failed")
        self._output.flush()

    def _fail_until_shutdown(self) -> None:
        """After the loop has failed: ends all requests, including those still in pool 1."""
        self._end_all(FinishReason.ERROR, "the engine failed")
        while (message := self._inbox.get()) is not None:
            message()
            self._end_all(FinishReason.ERROR, "the engine failed")

    def _close_memory(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
        try:
            self.kv.close_all()
        except Exception:
            logger.exception("giving K/V memory back failed")
        finally:
            self._executor.close()

    # ---- any thread: shutdown

    def stop_accepting(self) -> None:
        self._requests.close()

    def shutdown(self) -> None:
        """Aborts what is left, ends the threads and frees all memory. It blocks until that is
        done and may be called again."""
        self.stop_accepting()
        for state in self._requests.states():
            self.abort(state)
        self._prompt_pool.shutdown()  # quick: aborted requests are neither tokenized nor compiled
        self._preprocessor.masks.close()
        if self._loop_future is not None:
            self._inbox.put(None)
            self._wait_for_loop(self._loop_future)
            self._output.stop()
            self._loop_future = None
        elif self._compute.is_alive():  # loaded, but never started
            self._compute.submit(self._close_memory)
        if self._compute.is_alive():
            self._compute.stop()

    def _wait_for_loop(self, loop: Future[None]) -> None:
        """Waits for the loop's end, but not for a memory node that is alive but does not answer."""
        try:
            loop.result(_STEP_END_S)
        except TimeoutError:
            if self._recovery is not None:
                self._recovery.interrupt()
            loop.result()
