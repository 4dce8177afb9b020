"""The engine's end of the connection to one worker."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve.group.links import messages
from serve.group.links.messages import Kind, Message
from transport.base import Endpoint, TransportError
from transport.messages import view_of

_SLICE_S = 0.25
_END_S = 2.0  # for a worker to end by itself


ORDERLY_END = b"."
"""What the engine writes to a worker's standard input before it closes it."""


class WorkerFailed(Exception):
    """A worker cannot load or start; the text is its own."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank


class WorkerLink:
    """A worker's connection, and its process if the engine has started it.

    Only the engine's compute thread posts and polls; `is_lost` may be read by any thread.
    """

    def __init__(
        self, rank: int, endpoint: Endpoint, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.process = process
        self.host = ""
        self.url = ""  # where the next stage connects to
        self.sibling_url = ""  # where other tensor ranks connect to
        self.device = ""  # its name; "" where the rank computes in its host's memory
        self.free_bytes = 0
        self.needed_bytes = 0  # of those, by the largest step
        self.num_layers = 0  # loaded so far
        self.failure = ""  # what it reported of a step
        self.has_lost_link = False  # it has lost a connection to another rank
        self.moved: list[tuple[int, bool]] = []  # transfers of pages that have ended
        self.lost_holders: set[tuple[int, int]] = set()  # and their epochs, that it has lost
        self._was_lost: bool | None = None  # before this end closed the connection
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
        if self.endpoint.is_lost:
            return True
        return self.process is not None and self.process.poll() is not None

    @property
    def state(self) -> str:
        """What happened to a lost worker."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            return f"its process ended ({'signal' if code < 0 else 'exit status'} {abs(code)})"
        return "its connection is lost"

    def post(self, message: bytes) -> None:
        messages.post(self.endpoint, message)

    def post_json(self, kind: Kind, epoch: int, content: Mapping[str, object]) -> None:
        self.post(messages.pack_json(kind, epoch, content))

    def await_json(
        self,
        kind: Kind,
        timeout_s: float,
        check: Callable[[], object] = object,
        epoch: int | None = None,
    ) -> dict[str, Any]:
        """Returns the JSON of the next message of a kind (and an epoch), noting others on the way;
        check is called meanwhile. Raises WorkerFailed, and TransportError."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            check()
            content = self._take(_SLICE_S, kind, epoch)
            if content is not None:
                return content
            if self.is_lost:
                raise TransportError(f"rank {self.rank}: {self.state}")
        raise TransportError(f"rank {self.rank} sent no {kind.name} within {timeout_s:.0f} s")

    def next_json(self, kind: Kind, timeout_s: float) -> dict[str, Any] | None:
        """As await_json for any epoch, but returns None if the next message is another one or none
        arrives in time."""
        content = self._take(timeout_s, kind, None)
        if content is None and self.is_lost:
            raise TransportError(f"rank {self.rank}: {self.state}")
        return content

    def look(self, epoch: int) -> None:
        """Notes what has arrived unasked in an epoch. Raises TransportError."""
        while self._take(0.0, None, epoch) is not None:
            pass

    def _take(
        self, timeout_s: float, kind: Kind | None, epoch: int | None
    ) -> dict[str, Any] | None:
        """Takes one message; returns its JSON if it is of the kind, or if kind is None."""
        frame = self.endpoint.poll(timeout_s)
        if frame is None:
            return None
        message = None
        try:
            message = messages.read(view_of(frame))
            content = messages.read_json(message)
            return self._note(message, content, kind, epoch)
        except messages.MessageError as error:
            raise TransportError(f"rank {self.rank}: {error}") from error
        finally:
            message = None  # its view must go before the frame
            self.endpoint.release(frame)

    def _note(
        self, message: Message, content: dict[str, Any], kind: Kind | None, epoch: int | None
    ) -> dict[str, Any] | None:
        for holder, holder_epoch in content.get("holders", ()):  # in any epoch of the group
            self.lost_holders.add((int(holder), int(holder_epoch)))
        if message.kind is Kind.PROGRESS:
            self.num_layers = int(content.get("layers", 0))
        elif message.kind is Kind.FAILED and (epoch is None or message.epoch == epoch):
            # one of an earlier epoch, a step's, is known by the next stage or has ended that epoch
            self.failure = str(content.get("text", ""))[:1000]
            self.has_lost_link |= content.get("is_loss") is True
            if kind in (Kind.READY, Kind.STARTED):
                raise WorkerFailed(self.rank, self.failure)
        elif message.kind is Kind.MOVED:
            self.moved += [
                (int(ticket), works is True) for ticket, works in content.get("moved", ())
            ]
        if kind is None:
            return content
        is_due = message.kind is kind and (epoch is None or message.epoch == epoch)
        return content if is_due else None

    def post_end(self) -> None:
        """Says that the group ends, to a worker that would connect again."""
        if self.process is None and not self.endpoint.is_lost:
            with contextlib.suppress(TransportError):
                messages.post(self.endpoint, messages.pack(Kind.END, 0), _END_S)

    def await_end(self, end_s: float) -> None:
        """Waits until a worker that has been told to end has closed its connection."""
        while self.process is None and not self.endpoint.is_lost and time.monotonic() < end_s:
            time.sleep(0.01)

    def disconnect(self) -> None:
        """Ends the connection."""
        if self._was_lost is None:
            self._was_lost = self.is_lost
        self.endpoint.close()

    def close(self) -> None:
        """Ends the connection, after which the worker ends by itself; kills it if it does not, and
        at once if it is lost already. It may be called again."""
        self.disconnect()
        if self.process is None or self._is_closed:
            return
        self._is_closed = True
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                self.process.stdin.write(ORDERLY_END)
                self.process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if self._was_lost:  # it may be stopped
            self.process.kill()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_workers(links: Sequence[WorkerLink]) -> None:
    """Ends workers, all at once."""
    with contextlib.ExitStack() as stack:  # closes each, whatever another raises
        for link in links:
            stack.callback(link.close)
            link.post_end()
        end_s = time.monotonic() + _END_S
        for link in links:
            link.await_end(end_s)
            link.disconnect()
