"""The three pools and the loop between them, on plain threads.

Pool 1 tokenizes (N threads). Pool 2 is one thread that owns the scheduler, the KV manager and
the device: schedule, run, update. Pool 3 is one thread that detokenizes and hands deltas to the
sinks. Requests enter and leave the loop as messages, so no lock guards its state and nothing
outside is on the path between two steps. asyncio and offline faces sit on top of this.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from memory.kv_memory import KVMemory
from memory.nodes.node_set import NodeSet
from serve.engine.core_view import CoreView
from serve.engine.counters import RequestCounters
from serve.engine.early_rejection import EarlyRejection
from serve.engine.node_recovery import NodeRecovery
from serve.engine.output_processor import OutputProcessor, Sink, StepRecord
from serve.engine.overlapped_executor import make_executor
from serve.engine.preprocessor import Encode, PreparedRequest, Preprocessor, prepare_sequences
from serve.engine.request_limits import RequestLimits
from serve.engine.request_table import RequestState, RequestTable
from serve.engine.stats import EngineStats, engine_stats
from serve.engine.threads import ComputeThread, OutputThread, PromptPool
from serve.engine.watchdog import Watchdog
from serve.errors import EngineStoppedError, GenerationError
from serve.pooling import PoolingParams
from serve.request import FinishReason, Prompt, Request
from serve.runner.runner import Runner
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.text.detokenizer import DetokenizerFactory
from serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_IDLE_TRIM_S = 0.5
_WRITE_WAIT_S = 0.05  # between batches of pages that are written to the disk in idle moments
_NO_MEMORY_WAIT_S = 0.02  # until memory nodes are looked for again
_STEP_END_S = 2.0  # for a step that is under way when the engine stops
_FETCH_WAIT_S = 0.02  # with nothing to compute; messages are looked at in between
# How long a thread may hold the interpreter before another that waits gets it. The default of
# 5 ms would let pool 3 and HTTP stand in the way of the compute thread after every operator.
_SWITCH_INTERVAL_S = 2e-4


class EngineCore:
    """Threads, queues and the loop. submit() and abort() may be called from any thread."""

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
        nodes: NodeSet | None = None,
        tokenize_threads: int = 2,
        tokenize: Executor | None = None,
        make_output: Callable[[OutputProcessor], OutputThread] = OutputThread,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tokenize: pool 1; None: of tokenize_threads. make_output: pool 3."""
        self._runner = runner
        self._scheduler = scheduler
        self._kv = kv
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._eos, self._limits = eos_token_ids, limits
        self._clock = clock
        slo_s = limits.ttft_slo_s
        self._rejection = None if slo_s is None else EarlyRejection(scheduler, slo_s)
        self._recovery = None if nodes is None else self._make_recovery(nodes)
        self._preprocessor = Preprocessor(
            tokenizer, limits, scheduler.prefixes, self._rejection, self._eos, seed
        )
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests = RequestTable(limits)
        self._loop_future: Future[None] | None = None
        self._failure: BaseException | None = None
        counters = RequestCounters()
        self._output = make_output(
            OutputProcessor(
                lambda s, why: self._inbox.put(lambda: self._end_sequence(s, why)), counters
            )
        )
        self.watchdog = Watchdog(time.monotonic, self._output.is_alive)
        self._executor = make_executor(
            runner,
            scheduler,
            self._output,
            end_sequence=self._end_sequence,
            on_finished=self._release,
            on_nodes_lost=None if self._recovery is None else self._recovery.handle_loss,
            clock=clock,
        )
        self._prompt_pool = PromptPool(tokenize_threads, tokenize)
        self._compute = compute
        self.view = CoreView(
            scheduler,
            self._executor,
            counters,
            self._prompt_pool.counters,
            self._inbox.qsize,
            self._output,
            self._preprocessor.masks,
        )

    def _make_recovery(self, nodes: NodeSet) -> NodeRecovery:
        partitions, scheduler = self._kv.partitions, self._scheduler
        return NodeRecovery(
            nodes,
            partitions,
            scheduler,
            lambda s, why: self._end_sequence(s, FinishReason.ERROR, why),
        )

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._loop_future = self._compute.submit(self._compute_loop)
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
    ) -> RequestState:
        """Queue a request; its fate is told to the sink. `prompt` may be a function to run in
        pool 1 that returns token ids. Raises OverloadedError or EngineStoppedError."""
        began_s = self._clock() if arrived_s is None else arrived_s
        state = self._preprocessor.make_state(prompt, params, sink, began_s, request_id, client)
        compiles = self._preprocessor.masks.is_slow(state.params)

        def queue() -> None:
            self._prompt_pool.submit(lambda: self._prepare(state, prompt), compiles=compiles)

        self._requests.add(state, queue)  # before a shutdown that begins now looks there
        return state

    def check_grammar_queue(self, params: SamplingParams) -> None:
        """OverloadedError: too many wait for their grammars. For who is better told than waits."""
        if self._preprocessor.masks.is_slow(params):
            self._prompt_pool.check_compile_queue()

    def abort(self, state: RequestState) -> None:
        """End the request; its memory is free at the next step. Does nothing when it has ended."""
        state.is_aborted = True
        self._inbox.put(lambda: self._abort(state))

    def run_in_loop(self, job: Callable[[], None]) -> None:
        """Run it in the loop's thread, between two steps."""
        self._inbox.put(job)

    @property
    def has_failed(self) -> bool:
        """The loop met an error it could not lay on a request; nothing is accepted any more."""
        return self._failure is not None

    @property
    def kv(self) -> KVMemory:
        """The K/V manager; of it only the sizes may be read outside the loop."""
        return self._kv

    @property
    def has_memory(self) -> bool:
        """For K/V; memory nodes may be lost."""
        return self._kv.num_pages > 0

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

    def stop_accepting(self) -> None:
        self._requests.close()

    def shutdown(self) -> None:
        """Abort what is left, end the threads, give memory back. Blocks; may be called twice."""
        self.stop_accepting()
        for state in self._requests.states():
            self.abort(state)
        self._prompt_pool.shutdown()  # quick: what is aborted is neither tokenized nor compiled
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

    def _wait_for_loop(self, job: Future[None]) -> None:
        """A memory node that lives and does not answer shall not keep us."""
        try:
            job.result(_STEP_END_S)
        except TimeoutError:
            if self._recovery is not None:
                self._recovery.nodes.interrupt()
            job.result()

    def _close_memory(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
        try:
            self._kv.close_all()
        except Exception:
            logger.exception("giving K/V memory back failed")
        finally:
            self._runner.close()

    def _refuse(self, state: RequestState, error: Exception) -> None:
        self._requests.remove(state)
        state.notify_sink(lambda: state.sink.fail(error))

    def _prepare(self, state: RequestState, prompt: Prompt | Encode) -> None:
        """Pool 1's work: hand a request over to the loop, or tell the sink what is wrong."""
        try:
            request, arrival = self._preprocessor.prepare(state, prompt)
        except Exception as error:
            self._refuse(state, error)
        else:
            state.notify_sink(lambda: state.sink.accept(request))
            self._inbox.put(lambda: self._enqueue_or_refuse(state, request, arrival))

    # ---- pool 2: the loop

    def _compute_loop(self) -> None:
        try:
            while self._take_messages():
                self._step()
            self._drain_inbox()
        except BaseException as error:
            logger.exception("the compute loop failed; no new requests are accepted")
            self._failure = error
            self._requests.close()
            self._refuse_until_shutdown()
        finally:
            self._end_all(FinishReason.ABORT)
            self._refuse_rest()
            self._executor.abandon()
            self._close_memory()

    def _refuse_until_shutdown(self) -> None:
        """The loop has failed: until shutdown, whatever still comes in is told so."""
        self._end_all(FinishReason.ERROR, "the engine failed")
        while (message := self._inbox.get()) is not None:
            message()
            self._end_all(FinishReason.ERROR, "the engine failed")

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            if (message := self._inbox.get()) is not None:
                message()

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every sequence, even if the accounting of memory turns out to be broken."""
        try:
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._end_sequence(sequence, reason, error)
        except Exception:
            logger.exception("ending the sequences failed")
        self._output.flush()

    def _refuse_rest(self) -> None:
        """Nobody may wait for ever for a request that got lost."""
        for state in self._requests.states():
            self._refuse(state, EngineStoppedError("the engine has stopped"))

    def _take_messages(self) -> bool:
        """Handle what has arrived; wait for something when there is nothing to compute."""
        trimmed = is_writing = False
        while True:
            idle = not self._scheduler.has_work()
            if idle:
                self._executor.drain()
                self._executor.pause()
                self.watchdog.rest()
            try:
                if not idle:
                    message = self._inbox.get_nowait()
                elif trimmed and not is_writing and self._recovery is None:
                    message = self._inbox.get()
                else:
                    message = self._inbox.get(timeout=_WRITE_WAIT_S if is_writing else _IDLE_TRIM_S)
            except queue.Empty:
                if not idle:
                    return True
                self.watchdog.begin()
                if self._recovery is not None:
                    self._recovery.poll()
                self._kv.trim()
                is_writing = self._kv.prefixes.write_unwritten()
                trimmed = True
                continue
            self.watchdog.begin()
            if message is None:
                return False
            message()

    def _step(self) -> None:
        now_s = self._clock()
        if self._recovery is not None and not self._recovery.is_ready():
            self._executor.pause()
            self._wait_for_memory()
            return
        plan = self._scheduler.schedule(now_s)
        self.watchdog.begin(0 if plan is None else plan.num_total_rows)
        if plan is not None:
            self._executor.run(plan, now_s)
        elif not self._executor.drain():
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Nothing can be scheduled."""
        if self._kv.prefixes.is_transferring:
            # The head waits for its pages, or the pages it needs are still being written.
            self._executor.pause()
            self._kv.prefixes.wait(_FETCH_WAIT_S)
        elif not self._scheduler.running:
            # One sequence of max_model_len always fits (checked at start-up), except into what
            # is left when memory nodes are lost.
            is_short = self._recovery is not None and self._recovery.is_short
            assert is_short, "work, but nothing can be scheduled"
            self._executor.pause()
            self._wait_for_memory()

    def _wait_for_memory(self) -> None:
        time.sleep(_NO_MEMORY_WAIT_S)

    # ---- pool 2: messages

    def _enqueue_or_refuse(
        self, state: RequestState, request: Request, arrival: PreparedRequest
    ) -> None:
        """A fault while taking in a request ends that request only."""
        try:
            self._enqueue(state, request, arrival)
        except Exception:
            logger.exception("queueing %s failed", state.request_id)
            self._refuse(state, GenerationError("the engine failed to queue the request"))

    def _enqueue(self, state: RequestState, request: Request, arrival: PreparedRequest) -> None:
        if self._rejection is not None:
            self._rejection.queued(arrival.seconds)
        is_shared = self._scheduler.prefixes.is_on
        sequences = prepare_sequences(
            state, request, arrival, self._eos, self._detokenizers, is_shared=is_shared
        )
        state.sequences = sequences
        has_work = request.params.max_tokens != 0 or sequences[0].prompt_rows is not None
        if state.is_aborted or not has_work:
            reason = FinishReason.ABORT if state.is_aborted else FinishReason.LENGTH
            for sequence in sequences:
                sequence.status = SequenceStatus.FINISHED
                sequence.finish_reason = reason
            self._deliver_ended(sequences)
            return
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _abort(self, state: RequestState) -> None:
        ended = [s for s in state.sequences if self._scheduler.finish(s, FinishReason.ABORT)]
        if ended:
            self._deliver_ended(ended)

    def _end_sequence(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> None:
        if self._scheduler.finish(sequence, reason):
            self._deliver_ended([sequence], error)

    def _deliver_ended(self, sequences: list[Sequence], error: str | None = None) -> None:
        """These ended, and not with a step."""
        self._output.add(StepRecord([], [], None, sequences, self._clock(), error))
        self._release(sequences)

    def _release(self, finished: list[Sequence]) -> None:
        """A request whose sequences have all ended is not unfinished any more."""
        for request_id in {s.request.request_id for s in finished}:
            state = self._requests.get(request_id)
            if state is not None and all(s.is_finished for s in state.sequences):
                self._requests.remove(state)
