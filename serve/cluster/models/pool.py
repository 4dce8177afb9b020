"""The models' pool: lets requests wait for their models, and starts, wakes and ends these.

Every decision is taken in one place, `_decide`, which runs after each event. It serves requests in
the order of their arrival: the oldest request whose model is not in memory gets room first, from
models that are idle, else from busy ones, which then finish what they run and let later requests
wait. So no model waits for ever, and none is refused that could have waited.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable

from serve.cluster.models.errors import model_failed, queue_full, too_late
from serve.cluster.models.ledger import Holder, Move, choose_moves
from serve.cluster.models.model import Model, State, Switch, Waiter
from serve.cluster.models.switches import Switches
from serve.errors import MergestepError, message_of
from serve.http.edge.errors import ApiError, draining
from serve.units import format_memory

logger = logging.getLogger(__name__)

# how long a busy model is served at least before it has to give way: in seconds, and in times as
# long as it took to get ready
TURN_S, TURN_FACTOR = 2.0, 5.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0  # after the second failure in a row
_POLL_S = 0.02
_LONGEST_S = 3600.0  # between two decisions


class ModelPool:
    """Call acquire and release for each request, and close at the end."""

    def __init__(
        self,
        models: Iterable[Model],
        switches: Switches,
        *,
        budget_bytes: int,
        idle_s: float = math.inf,
        max_waiting: int = 1024,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.budget_bytes = budget_bytes
        self._switches = switches
        self._idle_s = idle_s
        self._max_waiting = max_waiting
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        return sum(len(model.waiters) for model in self.models.values())

    @property
    def num_running(self) -> int:
        return sum(model.running for model in self.models.values())

    @property
    def held_bytes(self) -> int:
        return sum(model.held_bytes for model in self.models.values())

    # ---- requests

    async def acquire(self, model: Model, timeout_s: float) -> None:
        """Returns when the model is ready, and counts a request that `release` must end. Raises
        ApiError: too many wait, the time is over, or the model cannot be started."""
        loop = asyncio.get_running_loop()
        if model.state is State.READY and not model.is_giving_way and not model.waiters:
            self._let_in(model, loop.time())
            return
        if self.num_waiting >= self._max_waiting:
            raise self._refused(model, queue_full(model.name))
        waiter = Waiter(loop.time(), loop.create_future())
        model.waiters.append(waiter)
        self._decide()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.is_let_in
        except BaseException as error:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
            elif waiter.is_let_in.done() and not _has_failed(waiter.is_let_in):
                self.release(model)  # let in at the moment in which it left
            if isinstance(error, TimeoutError):
                late = too_late(model.name, timeout_s, self._reason(model))
                raise self._refused(model, late) from None
            raise
        finally:
            model.wait_s.observe(loop.time() - waiter.arrived_s)
            self._decide()

    def release(self, model: Model) -> None:
        model.running -= 1
        model.used_s = asyncio.get_running_loop().time()
        if not model.running:
            self._decide()

    def _let_in(self, model: Model, now_s: float) -> None:
        model.running += 1
        model.used_s = now_s

    def _refused(self, model: Model, error: ApiError) -> ApiError:
        assert error.code is not None
        model.refuse(error.code)
        return error

    def _reason(self, model: Model) -> str:
        """Says what a waiting request waits for."""
        if model.state is State.STOPPED and model.failure:
            return f"its last start failed: {model.failure}"
        if model.state in (State.STOPPED, State.ASLEEP):
            busy = [each.name for each in self.models.values() if each.running]
            return f"memory is held by {', '.join(busy) or 'others'}"
        return f"it is {model.state.replace('_', ' ')}"

    # ---- decisions

    def _decide(self) -> None:
        """Starts what can be started now, and lets in the requests of models that are ready."""
        if self._is_closing:
            return
        now_s = asyncio.get_running_loop().time()
        giving_way: set[str] = set()
        look_s = math.inf  # when to decide again without an event
        for model in self._wanted():
            if now_s < model.retry_s:
                look_s = min(look_s, model.retry_s)
                continue
            others = self.held_bytes - model.held_bytes
            # a model that alone exceeds the budget is served alone
            lack = min(others, others + model.awake_bytes - self.budget_bytes)
            if lack <= 0:
                self._begin(model, Switch.START if model.state is State.STOPPED else Switch.WAKE)
                continue
            if not self._make_room(model, lack):
                giving_way, turn_s = self._choose_busy(model, lack, now_s)
                look_s = min(look_s, turn_s)
            break  # others must not take the room that the oldest request waits for
        for model in self.models.values():
            model.is_giving_way = model.name in giving_way
            if model.state is State.READY and not model.is_giving_way:
                look_s = min(look_s, self._serve(model, now_s))
        self._look_again(look_s - now_s)

    def _wanted(self) -> list[Model]:
        """Returns the models without memory that requests wait for, the longest first."""
        states = (State.STOPPED, State.ASLEEP)
        found = [each for each in self.models.values() if each.waiters and each.state in states]
        return sorted(found, key=lambda each: each.waiters[0].arrived_s)

    def _serve(self, model: Model, now_s: float) -> float:
        """Lets the requests of a ready model in, or puts it to sleep after its idle time. Returns
        when that is over."""
        while model.waiters:
            waiter = model.waiters.popleft()
            if not waiter.is_let_in.done():
                self._let_in(model, now_s)
                waiter.is_let_in.set_result(None)
        if model.running:
            return math.inf
        due_s = model.used_s + self._idle_s
        if now_s < due_s:
            return due_s
        self._begin(model, Switch.SLEEP)
        return math.inf

    def _make_room(self, model: Model, lack: int) -> bool:
        """Ends or puts to sleep idle models. Returns False if they are too few. Room that is being
        made already counts."""
        lack -= sum(
            each.held_bytes - (0 if each.state is State.STOPPING else each.asleep_bytes)
            for each in self.models.values()
            if each.state in (State.STOPPING, State.FALLING_ASLEEP)
        )
        if lack <= 0:
            return True
        idle = [each for each in self._others(model) if each.is_idle]
        moves = choose_moves([_holder(each) for each in idle], lack)
        for name, move in moves or ():
            self._begin(self.models[name], Switch.SLEEP if move is Move.SLEEP else Switch.STOP)
        return moves is not None

    def _choose_busy(self, model: Model, lack: int, now_s: float) -> tuple[set[str], float]:
        """Returns the busy models that have to give way, and else when the first may have to."""
        others = self._others(model)
        moves = choose_moves([_holder(each) for each in others], lack)
        if moves is None:  # a switch is in progress; or all others together are too small
            moves = [(each.name, Move.STOP) for each in others]
        chosen = [self.models[name] for name, _ in moves if self.models[name].running]
        turns = {each.name: each.ready_s + self._turn_s(each) for each in chosen}
        over = {name for name, turn_s in turns.items() if turn_s <= now_s}
        return over, min((turn_s for turn_s in turns.values() if turn_s > now_s), default=math.inf)

    def _others(self, model: Model) -> list[Model]:
        """Returns the other models that could give memory back, the least recently used first."""
        states = (State.READY, State.ASLEEP)
        found = [each for each in self.models.values() if each.state in states]
        return sorted(
            (each for each in found if each is not model),
            key=lambda each: (each.running > 0, each.ready_s if each.running else each.used_s),
        )

    def _turn_s(self, model: Model) -> float:
        start = model.switch_s[Switch.START]
        mean_s = start.sum / start.count if start.count else 0.0
        return max(TURN_S, TURN_FACTOR * mean_s)

    def _look_again(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(max(0.0, seconds), _LONGEST_S), self._decide)

    # ---- switches

    def _begin(self, model: Model, switch: Switch) -> None:
        """Begins a switch; the state says at once that it is in progress."""
        work: dict[Switch, tuple[State, Callable[[Model], Awaitable[None]]]] = {
            Switch.START: (State.STARTING, self._start),
            Switch.WAKE: (State.WAKING, self._wake),
            Switch.SLEEP: (State.FALLING_ASLEEP, self._sleep),
            Switch.STOP: (State.STOPPING, self._stop),
        }
        model.leaving_bytes = model.held_bytes
        model.state, run = work[switch]
        task = asyncio.create_task(self._timed(model, switch, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _timed(
        self, model: Model, switch: Switch, run: Callable[[Model], Awaitable[None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await run(model)
            model.switch_s[switch].observe(loop.time() - began_s)
            logger.info("%s: %s took %.2f s", model.name, switch, loop.time() - began_s)
        finally:
            self._decide()

    async def _start(self, model: Model) -> None:
        try:
            await self._switches.start(model, lambda: self._handle_end(model))
        except (MergestepError, OSError) as error:
            await self._switches.end(model)
            self._fail(model, message_of(error))
            return
        self._set_ready(model)

    async def _wake(self, model: Model) -> None:
        try:
            await self._switches.wake(model)
        except MergestepError as error:
            await self._switches.end(model)
            self._fail(model, message_of(error))
            return
        self._set_ready(model)

    async def _sleep(self, model: Model) -> None:
        try:
            await self._switches.sleep(model)
        except MergestepError as error:
            logger.warning("%s cannot sleep and is stopped: %s", model.name, error)
            await self._stop(model)
            return
        if not self._has_died(model):
            model.state = State.ASLEEP

    async def _stop(self, model: Model) -> None:
        await self._switches.retire(model)
        model.state = State.STOPPED

    def _set_ready(self, model: Model) -> None:
        if self._has_died(model):
            return
        if model.state in (State.STARTING, State.WAKING):
            model.state = State.READY
            model.ready_s = model.used_s = asyncio.get_running_loop().time()
            model.num_failures, model.failure = 0, ""
            needed = format_memory(model.awake_bytes)
            logger.info("%s is ready and takes %s", model.name, needed)

    def _handle_end(self, model: Model) -> None:
        """Called when a process has ended that nobody has asked to end, or that has been."""
        if model.state in (State.READY, State.ASLEEP) and not self._is_closing:
            how = "" if model.child is None else f" with {model.child.how}"
            logger.error("%s: its process has ended%s", model.name, how)
            model.child = None
            self._fail(model, f"its process has ended{how}")
            self._decide()

    async def lose(self, model: Model) -> None:
        """Ends a process that cannot be reached, so that the next request starts it again."""
        if model.child is not None and model.state is State.READY:
            await model.child.kill()
            self._handle_end(model)

    def _has_died(self, model: Model) -> bool:
        """Whether the process ended during a switch, which then failed."""
        child = model.child
        if child is not None and child.status is None:
            return False
        model.child = None
        self._fail(model, "its process has ended")
        return True

    def _fail(self, model: Model, reason: str) -> None:
        """Ends the requests that wait for a model that has failed. The next one starts it again."""
        model.state, model.failure = State.STOPPED, reason
        model.num_failures += 1
        model.num_failed += 1
        logger.error("%s has failed: %s", model.name, reason)
        if model.num_failures > 1:
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0**model.num_failures)
            model.retry_s = asyncio.get_running_loop().time() + pause_s
        waiters, model.waiters = list(model.waiters), type(model.waiters)()
        for waiter in waiters:
            if not waiter.is_let_in.done():
                error = self._refused(model, model_failed(model.name, reason))
                waiter.is_let_in.set_exception(error)

    async def put_to_sleep(self, model: Model) -> None:
        """Puts a model to sleep as soon as it is idle; nothing if it has no memory."""
        while model.state is State.READY:
            if model.is_idle:
                self._begin(model, Switch.SLEEP)
                break
            await asyncio.sleep(_POLL_S)
        while model.state is State.FALLING_ASLEEP:
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Ends all processes and refuses requests that still wait."""
        self._is_closing = True
        for model in self.models.values():
            for waiter in model.waiters:
                if not waiter.is_let_in.done():
                    waiter.is_let_in.set_exception(draining())
        self._look_again(math.inf)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._switches.end(model) for model in self.models.values()))


def _holder(model: Model) -> Holder:
    is_asleep = model.state is State.ASLEEP
    return Holder(
        model.name, model.held_bytes, model.held_bytes if is_asleep else model.asleep_bytes
    )


def _has_failed(future: asyncio.Future[None]) -> bool:
    return future.cancelled() or future.exception() is not None
