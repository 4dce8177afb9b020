"""A budget of memory for calls that take far more than their bodies have bytes.

Such work is charged what it is expected to take before it begins. What does not fit beside the
work in progress is refused with 429, and what would not fit alone with 400. A charge ends with its
call, however that ends. The factors are the peaks of the resident memory, of the server or of the
child process that encodes large texts, as `python -m bench.engine.memory_storm` measures them,
rounded up.

Freed memory stays with the process (ops/cpu/heap.py), since a step uses it again. So after large
work the heap is trimmed, beside the event loop and at most twice a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from serve.http.edge.errors import ApiError, overloaded
from serve.http.edge.json_body import Marks
from serve.http.edge.limits import JSON_CONTAINERS, JSON_VALUES
from serve.machine import trim_heap

BODY_BYTES = 2  # for a byte of a body: itself and its text
VALUE_BYTES = 48  # for a value in JSON
CONTAINER_BYTES = 256  # for an object or a list in JSON
ENCODE_BYTES = 440  # for a character to encode: tokenizers keep words, pieces and ids
TOKEN_BYTES = 16  # for a token id in an answer, and in the text of a piece of it
DECODE_BYTES = 160  # for a token to decode
LOGPROB_BYTES = 280  # for a log-probability in an answer: its objects and its JSON
EMBEDDING_BYTES = 8  # for a number of an embedding
STORED_BYTES = 8  # for a byte of a stored response that is parsed again
BODY_SHARE = 0.125
TRIM_BYTES = 32 << 20
_TRIM_WAIT_S = 0.5
_THREADS = 2  # for work that may take long, and as many for answers

T = TypeVar("T")


class MemoryBudget:
    """Counts what is charged, and owns the threads of the work. Only the event loop uses it. trim:
    returns freed memory to the system; a thread calls it."""

    def __init__(self, limit: int, trim: Callable[[], None] = trim_heap) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._trim = trim
        self._num_freed = 0
        self._is_trimming = False
        self._threads = ThreadPoolExecutor(_THREADS, "mergestep-large")
        self._answering = ThreadPoolExecutor(_THREADS, "mergestep-answer")
        self.submit, self.submit_answer = self._threads.submit, self._answering.submit

    def close(self) -> None:
        for threads in (self._threads, self._answering):
            threads.shutdown(wait=False, cancel_futures=True)

    def charge(self) -> Charge:
        """Returns a charge of nothing, which its owner releases."""
        return Charge(self)

    def freed(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._num_freed += num_bytes
        if self._num_freed >= TRIM_BYTES and not self._is_trimming:
            self._is_trimming = True
            # the objects of the work are freed just after its charge has ended
            asyncio.get_running_loop().call_later(_TRIM_WAIT_S, self._start_trim)

    def _start_trim(self) -> None:
        self._num_freed = 0
        self._is_trimming = False
        threading.Thread(target=self._trim, name="mergestep-trim", daemon=True).start()


def _no_memory_left() -> ApiError:
    return overloaded(
        "the server has no memory left for more requests of this size at once",
        code="memory_budget",
    )


class Charge:
    """The part of the budget that one call takes."""

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int, param: str | None = None, *, is_body: bool = False) -> None:
        """Raises ApiError 429 if there is no room now, and 400 if there never is. param: the field
        that makes the work large. is_body: it is a call's body, which every call of some length
        has: BODY_SHARE of the budget is for bodies alone, so that they find room beside large
        work."""
        budget = self._budget
        allowed = budget.limit if is_body else budget.limit - int(BODY_SHARE * budget.limit)
        if self.num_bytes + num_bytes > allowed:
            raise ApiError(
                400,
                f"the request would take about {(self.num_bytes + num_bytes) >> 20} MiB of memory;"
                f" at most {allowed >> 20} MiB are allowed",
                param=param,
                code="request_too_large",
            )
        if budget.num_bytes + num_bytes > allowed:
            raise _no_memory_left()
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Adds to the charge of work that has begun. Since a refusal ends an answer in its middle,
        such work may take as much again as the limit, and new work is refused meanwhile. Raises
        ApiError 429 beyond that."""
        budget = self._budget
        if budget.num_bytes + num_bytes > 2 * budget.limit:
            raise _no_memory_left()
        budget.num_bytes += num_bytes
        self.num_bytes += num_bytes

    async def run(self, job: Callable[[], T]) -> T:
        """Runs the job in a thread. If the call is cancelled meanwhile, its charge ends with the
        job, since a thread cannot be cancelled."""
        return await self._end_with(self._budget.submit(job))

    async def finish(self, job: Callable[[], T]) -> T:
        """Does the same for a job that makes an answer, which does not wait for long work."""
        return await self._end_with(self._budget.submit_answer(job))

    async def _end_with(self, working: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            if not working.cancelled():  # it has begun
                self._leave_to(working)
            raise

    def _leave_to(self, working: Future[T]) -> None:
        num_bytes, self.num_bytes = self.num_bytes, 0
        loop, budget = asyncio.get_running_loop(), self._budget

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(budget.freed, num_bytes)

        working.add_done_callback(ended)

    def reduce(self, num_bytes: int) -> None:
        """Ends a part of the charge."""
        self.num_bytes -= num_bytes
        self._budget.freed(num_bytes)

    def release(self) -> None:
        """Ends the charge. It may be called again."""
        if self.num_bytes:
            self.reduce(self.num_bytes)


def parsed_bytes(size: int, marks: Marks) -> int:
    """Returns the bytes that a body of a size and the objects parsed from it take. Its texts may
    have more marks than the parser allows."""
    num_values = min(JSON_VALUES, marks.num_between)
    num_containers = min(JSON_CONTAINERS, marks.num_opening)
    return BODY_BYTES * size + VALUE_BYTES * num_values + CONTAINER_BYTES * num_containers


def encode_bytes(text: str, growth: float = 1.0) -> int:
    """Returns the bytes that it takes to encode a text. growth: see Tokenizer.growth."""
    num_chars = len(text) if text.isascii() else max(len(text), len(text.encode()) // 2)
    return int(ENCODE_BYTES * num_chars * growth)
