"""A worker: one rank of a group other than the engine. It obeys the engine's messages in order.

A worker outlives steps that fail and groups that are formed again: its weights stay. It ends when
the engine closes its connection, or says that the group ends.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memory.nodes.errors import NodesLostError
from serve.config import EngineConfig
from serve.errors import MergestepError
from serve.group.grid import Grid
from serve.group.kept_rank import KeptRank
from serve.group.links import messages
from serve.group.links.messages import Kind, Message, MessageError, PlannedStep
from serve.group.links.stage_link import StageFailed, StageLink, StageListener, StageLost
from serve.group.rank import HostExchange, Rank
from serve.group.siblings import SiblingListener, connect_exchange
from serve.group.sizes import open_exchange, sibling_window_bytes
from serve.loading.model_source import read_source
from serve.loading.rank_memory import RankGeometry
from serve.machine import available_memory
from serve.models.progress import LoadProgress
from transport import listen
from transport.arena import ExchangeError, RankMissing
from transport.base import Endpoint, Frame, PeerLostError, TransportError
from transport.messages import view_of

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_MOVING_POLL_S = 0.002  # while the disk moves pages, whose ends the engine waits for


class Worker:
    """Serves one engine over its connection."""

    def __init__(
        self,
        engine: Endpoint,
        key: bytes,
        settings: Mapping[str, object],
        local_rank: int | None = None,
        kept: KeptRank | None = None,
    ) -> None:
        """settings: fields of EngineConfig that differ on this host from the engine's. local_rank:
        this rank's number among those of its host; None: all ranks are on one. kept: what an
        earlier worker of this process has loaded."""
        self._local_rank = local_rank
        self._engine = engine
        self._key = key
        self._settings = dict(settings)
        self._kept = kept or KeptRank()
        self._rank: Rank | None = None
        self._epoch = 0
        self.has_ended = False  # the engine has said so
        self._listener: StageListener | None = None
        self._siblings: SiblingListener | None = None
        self._next_frame: Frame | None = None  # arrived while the rank waited for another one
        self._previous: StageLink | None = None
        self._next: StageLink | None = None
        self._grid: Grid | None = None

    def serve(self) -> None:
        """Handles messages until the engine is gone."""
        handlers: dict[Kind, Callable[[Message], None]] = {
            Kind.LOAD: self._load,
            Kind.START: self._start,
            Kind.STEP: self._step,
            Kind.EDITS: self._edit,
            Kind.HEAD: self._head,
            Kind.RESET: self._reset,
            Kind.HOLDER: self._hold,
            Kind.END: self._end,
        }
        try:
            while not self.has_ended:
                frame, self._next_frame = self._next_frame, None
                frame = frame or self._engine.poll(self._report_moved())
                if frame is None:
                    continue
                message = None
                try:
                    message = messages.read(view_of(frame))
                    handler = handlers.get(message.kind)
                    if handler is None:
                        raise MessageError(f"{message.kind.name} from the engine")
                    handler(message)
                finally:
                    message = None  # its view must go before the frame
                    self._engine.release(frame)
        except PeerLostError:
            logger.info("the engine has closed the connection")
        except (TransportError, MessageError, OSError) as error:  # OSError: of memory's edits
            logger.error("the worker ends: %s", error)
        finally:
            self.close()

    def close(self) -> None:
        self._close_links()
        for listener in (self._listener, self._siblings):
            if listener is not None:
                listener.close()
        if self._rank is not None:
            self._rank.end()
            self._rank = None
        self._engine.close()

    def _close_links(self) -> None:
        for link in (self._previous, self._next):
            if link is not None:
                link.close()
        self._previous = self._next = None

    # ---- set-up

    def _load(self, message: Message) -> None:
        """Loads the rank's weights, unless it has them already."""
        content = messages.read_json(message)
        try:
            if self._rank is None:
                self._rank = self._loaded(content)
            rank, grid = self._rank, self._grid
            assert grid is not None
            if grid != Grid.from_json(content["grid"]) or rank.number != content["rank"]:
                raise MessageError("another place in another grid than the loaded weights'")
            has_next = grid.place(rank.number).stage + 1 < grid.num_stages
            ready = {
                "device": rank.room.device,
                "free_bytes": rank.room.free if rank.room.device else available_memory(),
                "needed_bytes": rank.room.needed,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "url": self._listen(content) if has_next else "",
                "sibling_url": self._listen_to_siblings(content, rank),
            }
        except (
            MergestepError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            MemoryError,
            TransportError,
        ) as error:
            logger.exception("loading failed")
            self._report(Kind.FAILED, {"text": f"{type(error).__name__}: {error}"})
            return
        self._report(Kind.READY, ready)

    def _loaded(self, content: dict[str, Any]) -> Rank:
        config = EngineConfig(**(content["config"] | self._settings))
        self._grid = grid = Grid.from_json(content["grid"])
        number = int(content["rank"])
        _keep_to(content.get("cpus"))
        num_loaded = 0

        def check() -> None:
            nonlocal num_loaded
            self._report(Kind.PROGRESS, {"layers": num_loaded})
            num_loaded += 1

        local_rank = number if self._local_rank is None else self._local_rank

        def load() -> Rank:
            source = read_source(config, local_rank)
            return Rank(source, grid, number, LoadProgress(check=check))

        return self._kept.get(config, grid, number, load)

    def _listen(self, content: dict[str, Any]) -> str:
        """Returns where the next stage connects to."""
        if self._listener is None:
            url = str(content["stage_url"])
            self._listener = StageListener(listen(url, key=self._key, window_bytes=1 << 16))
        return self._listener.url

    def _listen_to_siblings(self, content: dict[str, Any], rank: Rank) -> str:
        """Returns where the tensor ranks before this one connect to; "" if none does."""
        url = content.get("sibling_url")
        if not isinstance(url, str) or not url or rank.place.tensor == 0:
            return ""
        if self._siblings is None:
            window = sibling_window_bytes(rank.source.spec, rank.shard.size)
            self._siblings = SiblingListener(url, self._key, window)
        return self._siblings.url

    def _start(self, message: Message) -> None:
        """Takes memory for K/V and connects to the other ranks."""
        content = messages.read_json(message)
        rank, grid = self._rank, self._grid
        if rank is None or grid is None:
            raise MessageError("START before LOAD")
        self._close_links()
        self._epoch = message.epoch
        try:
            geometry = RankGeometry.from_json(content["geometry"])
            rank.open(geometry, self._exchange(content, rank, grid), content.get("meeting"))
            rank.join(self._epoch)
            if content.get("previous"):
                self._previous = StageLink.connect(
                    str(content["previous"]),
                    self._key,
                    self._epoch,
                    int(content["window_bytes"]),
                )
            if self._listener is not None:
                self._next = self._listener.accept(self._epoch, self._is_epoch_over)
            rank.prepare()
        except (MergestepError, OSError, ValueError, KeyError, TransportError) as error:
            is_other = isinstance(error, (ExchangeError, TransportError))  # another rank is lost
            logger.error("starting failed: %s", error, exc_info=None if is_other else error)
            self._report(Kind.FAILED, {"text": f"{type(error).__name__}: {error}"})
            rank.abort()  # others may wait for this one
            return
        self._report(Kind.STARTED, {})

    def _exchange(self, content: dict[str, Any], rank: Rank, grid: Grid) -> HostExchange | None:
        """Opens the exchange with the other tensor ranks: connections, or an arena."""
        urls, tensor = content.get("siblings"), rank.place.tensor
        if not isinstance(urls, list):
            arena, spins_s = content.get("arena"), content.get("spins_s")
            return open_exchange(rank.source, grid, tensor, arena, spins_s)
        return connect_exchange(
            rank.source, grid, tensor, urls, self._siblings, self._key, self._epoch
        )

    def _hold(self, message: Message) -> None:
        """Attaches to a holder of segments, or leaves it."""
        content = messages.read_json(message)
        holders = None if self._rank is None else self._rank.holders
        holder, num_pages, epoch = (int(content[x]) for x in ("holder", "num_pages", "epoch"))
        if not num_pages:
            if holders is not None:
                holders.detach(holder)
            return
        if holders is None:
            raise MessageError("HOLDER for a rank without holders")
        reply: dict[str, object] = {"epoch": epoch}
        try:
            connect_s = float(content["connect_s"])
            reply |= holders.attach(holder, num_pages, epoch, connect_s)._asdict()
        except (TransportError, OSError) as error:
            reply["error"] = str(error) or type(error).__name__
        self._report(Kind.HELD, reply)

    def _end(self, message: Message) -> None:
        self.has_ended = True

    def _is_epoch_over(self) -> bool:
        """Returns whether the engine has sent more before this rank has started: then another rank
        is lost, and the group is formed anew."""
        if self._next_frame is None:
            self._next_frame = self._engine.poll(0.0)
        return self._next_frame is not None

    def _reset(self, message: Message) -> None:
        """Begins an epoch after a step that failed. Its steps come after the engine has been told
        that all ranks are here."""
        self._epoch = message.epoch
        if self._rank is not None:
            self._rank.join(self._epoch)
        for link in (self._previous, self._next):
            if link is not None:
                link.epoch = self._epoch
        self._report(Kind.STARTED, {})

    def _report(self, kind: Kind, content: Mapping[str, object]) -> None:
        messages.post(self._engine, messages.pack_json(kind, self._epoch, content))

    def _report_moved(self) -> float:
        """Reports transfers of pages that have ended; returns how long to wait for a message."""
        tier = None if self._rank is None else self._rank.tier
        if tier is None or not tier.is_moving:
            return _POLL_S
        if moved := tier.take_moved():
            self._report(Kind.MOVED, {"moved": moved})
        return _MOVING_POLL_S

    # ---- steps

    def _edit(self, message: Message) -> None:
        assert self._rank is not None
        self._rank.edit(messages.read_edits(message))

    def _step(self, message: Message) -> None:
        """Computes the rank's layers. A failure is reported to the engine and to the next stage;
        the step's rows are computed again later."""
        rank, number = self._rank, message.number
        if rank is None:
            raise MessageError("STEP before START")
        step = messages.read_step(message)
        rank.edit(step.edits)
        try:
            out = self._computed(rank, step, number)
            rank.settle()
            if self._next is not None:
                self._next.send(number, rank.on_host(out))
        except (StageLost, RankMissing, TransportError) as error:
            self._failed(number, str(error), is_loss=True)
        except (StageFailed, ExchangeError) as error:
            self._failed(number, str(error))
        except NodesLostError as error:
            logger.warning("%s", error)
            self._failed(number, str(error), is_own=True)
        except Exception as error:
            logger.exception("a step failed")
            self._failed(number, f"{type(error).__name__}: {error}", is_own=True)

    def _computed(self, rank: Rank, step: PlannedStep, number: int) -> Tensor:
        hidden = None
        if self._previous is not None:
            hidden = self._previous.receive(number, len(step.input_ids))
        return rank.forward(step, hidden)

    def _failed(
        self, number: int, text: str, *, is_own: bool = False, is_loss: bool = False
    ) -> None:
        """Says that this rank has no result of a step. is_loss: a connection between ranks is lost,
        so the group has to be formed anew."""
        assert self._rank is not None
        if is_own or is_loss:  # first: an engine that waits in a barrier then looks for the reason
            holders = self._rank.holders
            lost = [] if holders is None else holders.lost()
            self._report(Kind.FAILED, {"text": text, "is_loss": is_loss, "holders": lost})
        self._rank.abort()
        if self._next is not None:
            try:
                self._next.send_failure(number, text, is_loss=is_loss)
            except TransportError as error:
                logger.warning("the next stage is lost: %s", error)

    @torch.inference_mode()
    def _head(self, message: Message) -> None:
        """Computes the rank's columns of logits for rows that the engine sends."""
        assert self._rank is not None
        try:
            self._rank.head(message.rows)
            self._rank.settle()
        except ExchangeError as error:
            logger.info("logits were dropped: %s", error)
            self._rank.abort()  # others may wait for this one
        except Exception as error:
            logger.exception("logits failed")
            self._failed(message.number, f"{type(error).__name__}: {error}", is_own=True)


def _keep_to(cpus: object) -> None:
    """Keeps this process to some cores, if the engine has chosen any that exist here."""
    if isinstance(cpus, list) and cpus and set(cpus) <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
