"""One model on the cluster: the ranks that serve it, and the supervision that keeps them there."""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from serve.cluster.placement import Node, Shape, place_stages, too_few
from serve.cluster.rank_actor import RankState
from serve.cluster.rank_process import RankSpec
from serve.cluster.ray_cluster import Cluster, Lost, Room, Seat, close_all
from serve.errors import MergestepError

_GATHER_S = 1.0  # after a rank has failed to start: others may tell more
_STEADY_S = 20.0  # a process that ran so long is restarted at once
_MAX_PAUSE_S = 30.0  # between two starts of one rank
_MAX_KILLED = 3  # before the first answer
_ACTOR_S = 5.0  # until an actor that Ray has given up is made again
_ENGINE_S = 15.0  # for the engine to end, beside its requests
_OTHERS_S = 10.0  # for the other ranks to end with it
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Content:
    """What the ranks run. settings: those of `serve run` as TOML. key: the secret of the group.
    secrets: variables of the environment. cwd: the folder to start in."""

    settings: str = field(repr=False)
    key: str = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False, default_factory=dict)
    cwd: str = ""


@dataclass(slots=True)
class _Member:
    """A rank. generation: of the process that is wanted. began_s: when it was seen first. lost_s:
    since when its actor does not answer."""

    rank: int
    seat: Seat
    generation: int = 1
    state: RankState | None = None
    num_failures: int = 0
    began_s: float = 0.0
    restart_s: float | None = None
    lost_s: float | None = None
    failure: str = ""
    lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=50))

    @property
    def runs(self) -> bool:
        state = self.state
        return state is not None and state.generation == self.generation and state.status is None


class Replica:
    """Call place, then step again and again, then drain and close."""

    def __init__(
        self,
        cluster: Cluster,
        shape: Shape,
        content: Content,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """say: is called with lines of the ranks' logs and of this supervision."""
        self.shape = shape
        self._cluster = cluster
        self._content = content
        self._say = say
        self._clock = clock
        self._room: Room | None = None
        self._members: list[_Member] = []
        self._nodes: dict[str, Node] = {}
        self._url = ""
        self._was_ready = False
        self._fail_s: float | None = None

    def place(self, timeout_s: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Reserves room and starts the actors. ConfigError if there is no room for so long."""
        nodes = self._cluster.nodes()
        if place_stages(nodes, self.shape) is None:
            self._say(f"waiting up to {timeout_s:g} s for room: {too_few(nodes, self.shape)}")
        self._room = self._cluster.reserve(self.shape)
        end_s = self._clock() + timeout_s
        while not self._room.is_there(0.5):
            if is_stopped():
                return
            if self._clock() > end_s:
                raise too_few(self._cluster.nodes(), self.shape)
        self._members = [_Member(rank, self._room.seat(rank)) for rank in range(self.shape.size)]

    # ---- what there is

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 serves, and all ranks run."""
        return bool(self.http_url) and all(member.runs for member in self._members)

    @property
    def http_url(self) -> str:
        """Where rank 0 serves HTTP, by its node's address if it listens on all; "" until then."""
        state = self._members[0].state if self._members else None
        if state is None or not state.http_url:
            return ""
        parts = urlsplit(state.http_url)
        node = self._node(state.node)
        if parts.hostname not in ("0.0.0.0", "::") or not node.address:
            return state.http_url
        host = f"[{node.address}]" if ":" in node.address else node.address
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))

    def places(self) -> list[Node]:
        """Returns the node of each rank."""
        states = [member.state for member in self._members]
        return [self._node(state.node if state is not None else "") for state in states]

    def pids(self) -> list[int]:
        """Returns the process of each rank; 0 where there is none."""
        states = [member.state for member in self._members]
        return [state.pid if state is not None else 0 for state in states]

    def _node(self, node_id: str) -> Node:
        if node_id not in self._nodes:
            self._nodes |= {node.id: node for node in self._cluster.nodes()}
        return self._nodes.get(node_id, Node(node_id, "", 0.0))

    # ---- supervision

    def step(self) -> None:
        """Looks after all ranks once, without a wait. MergestepError if the model cannot be started
        at all."""
        for member in self._members:
            self._look(member)
        self._was_ready = self._was_ready or self.is_ready
        now_s = self._clock()
        if self._fail_s is not None:
            if now_s > self._fail_s:
                failures = [member.failure for member in reversed(self._members)]
                raise MergestepError("; ".join(filter(None, failures)))
            return
        for member in self._members:
            if member.restart_s is not None and now_s >= member.restart_s:
                member.restart_s = None
                member.generation += 1

    def _look(self, member: _Member) -> None:
        answer = member.seat.poll(self._spec(member))
        if isinstance(answer, Lost):
            self._handle_lost(member, answer)
        elif answer is not None:
            self._handle_state(member, answer)

    def _spec(self, member: _Member) -> RankSpec | None:
        if member.rank and not self._url:
            return None
        content, rank = self._content, member.rank
        place = (member.generation, rank, self.shape.size, self._url)
        return RankSpec(*place, content.settings, content.key, content.secrets, content.cwd)

    def _handle_lost(self, member: _Member, lost: Lost) -> None:
        now_s = self._clock()
        if member.lost_s is None:
            member.lost_s = now_s
            if member.state is not None:
                self._say(f"rank {member.rank}: its actor is lost, Ray starts it again")
            member.state = None
        if not lost.is_final or now_s < member.lost_s + _ACTOR_S:
            return
        if not self._was_ready:
            self._fail(member, f"rank {member.rank} has no actor: {lost.reason}")
            return
        assert self._room is not None
        member.seat, member.lost_s = self._room.seat(member.rank), None

    def _handle_state(self, member: _Member, state: RankState) -> None:
        before, member.state, member.lost_s = member.state, state, None
        for line in state.lines:
            member.lines.append(line)
            self._say(f"rank {member.rank} | {line}")
        if state.generation != member.generation or not state.pid:
            return
        if before is None or before.pid != state.pid:
            where = self._node(state.node).name
            self._say(f"rank {member.rank} starts on {where} as process {state.pid}")
            member.began_s = self._clock()
        if member.rank == 0 and state.status is None and state.group_url != self._url:
            self._move(state.group_url)
        if state.status is not None and member.restart_s is None and not member.failure:
            self._handle_end(member, state.status)

    def _move(self, url: str) -> None:
        """Rank 0 listens elsewhere: ranks that look for it at its old address start again."""
        self._url = url
        for member in self._members[1:]:
            member.generation += 1
            member.restart_s = None

    def _handle_end(self, member: _Member, status: int) -> None:
        now_s = self._clock()
        how = f"status {status}" if status >= 0 else f"signal {-status}"
        ran_s = now_s - member.began_s
        member.num_failures = 1 if ran_s > _STEADY_S else member.num_failures + 1
        if not self._was_ready and (status > 0 or member.num_failures >= _MAX_KILLED):
            assert member.state is not None
            where = self._node(member.state.node).name
            text = f"rank {member.rank} on {where} ended with {how}{_last_words(member.lines)}"
            self._fail(member, text)
            return
        if member.rank == 0 and status > 0:
            self._url = ""  # a new port: another process may have taken the old one
        pause_s = 0.0
        if member.num_failures > 1:
            pause_s = min(_MAX_PAUSE_S, 0.5 * 2.0**member.num_failures)
        self._say(f"rank {member.rank} ended with {how}; it is started again after {pause_s:g} s")
        member.restart_s = now_s + pause_s

    def _fail(self, member: _Member, text: str) -> None:
        member.failure = text
        if self._fail_s is None:
            self._fail_s = self._clock() + _GATHER_S

    def restart(self) -> None:
        """Ends rank 0, which hands its calls over; all ranks then start again."""
        self._members[0].seat.send_signal(signal.SIGTERM)

    # ---- the end

    def drain(self, drain_s: float, num_signals: Callable[[], int]) -> None:
        """Ends rank 0 after its requests, which then ends the others. num_signals: how many this
        process has got: the second is handed on, the third ends the wait."""
        if not self._members:
            return
        engine, others = self._members[0], self._members[1:]
        num_sent = 0
        end_s = self._clock() + drain_s + _ENGINE_S
        while not self._has_ended(engine) and self._clock() < end_s and num_signals() < 3:
            if num_sent < max(1, min(2, num_signals())):
                engine.seat.send_signal(signal.SIGTERM)
                num_sent += 1
            time.sleep(_LOOK_S)
        end_s = self._clock() + _OTHERS_S
        while self._clock() < end_s and num_signals() < 3:
            if sum(not self._has_ended(member) for member in others) == 0:
                break
            time.sleep(_LOOK_S)

    def _has_ended(self, member: _Member) -> bool:
        """Whether a rank has no process, or an actor that is lost with it."""
        answer = member.seat.poll(None)
        if isinstance(answer, Lost):
            member.state = None
        elif answer is not None:
            member.state = answer
            for line in answer.lines:
                self._say(f"rank {member.rank} | {line}")
        state = member.state
        return state is None or not state.pid or state.status is not None

    def close(self) -> None:
        """Ends what still runs, and gives the room back."""
        close_all([member.seat for member in self._members])
        self._members = []
        if self._room is not None:
            self._room.close()
            self._room = None


def _last_words(lines: collections.deque[str]) -> str:
    """Returns the error in a log, or its last line."""
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or list(lines) or [""])[-1]
    return f": {last.removeprefix('error: ')}" if last else ""
