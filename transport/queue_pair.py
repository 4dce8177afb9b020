"""One reliable queue pair: connecting it, chained writes, completions.

It knows the memory it sends from and receives into as an address and a size, and the peer as a
`QueuePairAddress`. What the bytes are, and how the two ends get each other's address, is the
business of `transport.rdma`.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from transport.base import PeerLostError, RefusedError, TransportError
from transport.verbs import Port, constants, pyverbs, verbs_errors

MAX_INLINE_BYTES = 64
"""Copied into the work request itself, which saves the device a read of our memory."""
SIGNAL_EVERY = 16
"""Posts of which one reports its completion. It stands for those before it: they run in order."""
GID = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){7}")


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """The address that one end sends over the control connection so that its peer can write."""

    queue_pair: int
    packet_number: int
    lid: int
    gid: str
    mtu: int
    """1 to 5: 256 to 4,096 bytes (enum ibv_mtu)."""
    window_key: int
    window_address: int

    def to_wire(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_wire(cls, values: object) -> QueuePairAddress:
        """Checks each value that a peer sent before anything is made from it.

        Raises RefusedError.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise RefusedError("the peer's queue pair: not the fields of this version")
        limits = {
            "queue_pair": (2, (1 << 24) - 1),  # 0 and 1 are reserved for subnet management
            "packet_number": (0, (1 << 24) - 1),
            "lid": (0, 0xBFFF),  # higher ones are multicast
            "mtu": (1, 5),
            "window_key": (0, (1 << 32) - 1),
            "window_address": (4096, 1 << 62),
        }
        for name, (low, high) in limits.items():
            value = values[name]
            if type(value) is not int or not low <= value <= high:
                raise RefusedError(f"the peer's queue pair: {name} is not in {low}..{high}")
        gid = values["gid"]
        if not isinstance(gid, str) or not GID.fullmatch(gid) or gid.startswith("ff"):
            raise RefusedError("the peer's queue pair: gid is not an address of one port")
        if values["window_address"] % 4096:
            raise RefusedError("the peer's queue pair: window_address is not a page's")
        return cls(**values)


class QueuePair:
    """A reliable connection that writes `outgoing` memory into the peer's window, at the same
    offsets, and lets the peer write ours.

    `num_arrived` counts the peer's writes with immediate data other than 0; all that was written
    before each of them is in our memory. Closing frees the registrations; the caller owns the
    memory. One thread at a time uses it, and none after it is closed.
    """

    def __init__(self, port: Port, window: tuple[int, int], max_posts: int) -> None:
        """window is the address and size of the memory that the peer may write; max_posts is the
        most posts in flight. Raises TransportError.
        """
        self.context = port.context  # this, `domain` and `pair` are pyverbs's, for lanes
        self._port = port
        self._e = e = constants()
        self._wr = pyverbs("wr")
        self._error = pyverbs("pyverbs_error").PyverbsError
        self._send_limit = 2 * max_posts + 4 * SIGNAL_EVERY
        self._num_receives = 2 * max_posts
        self.num_arrived = 0
        self._num_posted = 0  # work requests
        self._num_completed = 0
        self._num_unreported = 0
        self._outgoing: Any = None
        self._peer: QueuePairAddress | None = None
        self._last_requests: dict[tuple[int, int, int | None], Any] = {}
        cq, qp = pyverbs("cq"), pyverbs("qp")
        with verbs_errors("setting up a queue pair"):
            self.domain = pyverbs("pd").PD(port.context)
            self._channel, self.event_fd = _completion_channel(cq, port.context)
            self._event = select.poll()
            self._event.register(self.event_fd, select.POLLIN)
            self._sent = cq.CQ(port.context, self._send_limit)
            self._received = cq.CQ(port.context, self._num_receives, None, self._channel)
            capacity = qp.QPCap(self._send_limit, self._num_receives, 1, 1, MAX_INLINE_BYTES)
            self.pair = qp.QP(
                self.domain,
                qp.QPInitAttr(
                    qp_type=e.IBV_QPT_RC,
                    scq=self._sent,
                    rcq=self._received,
                    cap=capacity,
                    sq_sig_all=0,
                ),
                qp.QPAttr(port_num=port.number),
            )
            self._window = self._register(*window, e.IBV_ACCESS_REMOTE_WRITE)
        # Immediate data needs no memory, but pyverbs wants some: it gets the peer's window.
        self._receive = self._wr.RecvWR(
            num_sge=1, sg=[self._wr.SGE(window[0], 64, self._window.lkey)]
        )
        self.address = QueuePairAddress(
            queue_pair=self.pair.qp_num,
            packet_number=secrets.randbits(24),
            lid=port.lid,
            gid=port.gid,
            mtu=port.mtu,
            window_key=self._window.rkey,
            window_address=window[0],
        )

    def _register(self, address: int, num_bytes: int, access: int) -> Any:
        try:
            return pyverbs("mr").MR(
                self.domain, num_bytes, access | self._e.IBV_ACCESS_LOCAL_WRITE, address
            )
        except pyverbs("pyverbs_error").PyverbsRDMAError as error:
            raise TransportError(
                f"{num_bytes} bytes at {address:#x} could not be registered: "
                f"{os.strerror(error.error_code)}. Registered memory counts as locked: "
                "see `ulimit -l`"
            ) from error

    def connect(self, peer: QueuePairAddress, outgoing: tuple[int, int]) -> None:
        """Makes the pair ready to receive and to send. outgoing is the address and size of the
        memory that mirrors the peer's window. Raises RefusedError and TransportError.
        """
        port, e, addr = self._port, self._e, pyverbs("addr")
        if port.is_ethernet and not peer.gid.strip("0:"):
            raise RefusedError("the peer's queue pair: an Ethernet port needs a gid")
        with verbs_errors("connecting a queue pair"):
            self._outgoing = self._register(*outgoing, 0)
            route = addr.GlobalRoute(
                dgid=addr.GID(peer.gid), sgid_index=port.gid_index, hop_limit=64
            )
            attributes = pyverbs("qp").QPAttr(
                port_num=port.number, path_mtu=min(port.mtu, peer.mtu)
            )
            attributes.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
            attributes.dest_qp_num = peer.queue_pair
            attributes.rq_psn = peer.packet_number
            attributes.sq_psn = self.address.packet_number
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
            attributes.min_rnr_timer = 1  # 10 us: the peer's receives will be refilled soon
            attributes.rnr_retry = 7  # for ever: the control connection notices a lost peer
            attributes.timeout = 14  # 67 ms
            attributes.retry_cnt = 7
            attributes.ah_attr = addr.AHAttr(
                dlid=peer.lid,
                is_global=int(port.is_ethernet),
                port_num=port.number,
                gr=route if port.is_ethernet else None,
            )
            self.pair.to_init(attributes)
            for _ in range(self._num_receives):
                self.pair.post_recv(self._receive)
            self.pair.to_rts(attributes)
        self._peer = peer
        self._source = self._wr.SGE(0, 0, self._outgoing.lkey)
        self._outgoing_address = outgoing[0]

    def is_ordered(self) -> bool:
        """Returns whether the device promises that memory fills in the order of the peer's writes.
        If not, only `num_arrived` shows that they have all arrived. Call it after `connect`."""
        write = self._e.IBV_WR_RDMA_WRITE
        return bool(self.pair.query_data_in_order(write, 0))

    def write(
        self, pieces: list[tuple[int, int]], immediate: int | None, *, reports: bool = False
    ) -> None:
        """Copies (offset, bytes) of the outgoing memory to the same offsets in the peer's window,
        in this order, in one post. The last write carries `immediate`. reports: see `is_idle`.

        The last piece is at most MAX_INLINE_BYTES and may be overwritten at once, the others
        when the peer has seen the last. Waits while the send queue is full. Raises
        PeerLostError and TransportError.
        """
        e = self._e
        self.reap()
        while self._num_posted + len(pieces) - self._num_completed > self._send_limit:
            os.sched_yield()
            self.reap()
        self._num_posted += len(pieces)
        self._num_unreported += 1
        flags = e.IBV_SEND_INLINE
        if reports or self._num_unreported >= SIGNAL_EVERY:
            flags |= e.IBV_SEND_SIGNALED
            self._num_unreported = 0
        last = self._last_request(*pieces[-1], immediate)
        last.wr_id = self._num_posted
        last.send_flags = flags
        chain = [last]  # a request points to the next without owning it: kept until posted
        for offset, num_bytes in reversed(pieces[:-1]):
            chain.append(self._request(e.IBV_WR_RDMA_WRITE, offset, num_bytes))
            chain[-1].next_wr = chain[-2]
        try:
            self.pair.post_send(chain[-1])
        except self._error as error:
            raise TransportError(f"posting a write: {error}") from error
        finally:
            for request in chain[1:]:
                request.close()  # not all releases do so

    def _last_request(self, offset: int, num_bytes: int, immediate: int | None) -> Any:
        """Returns the request of a small last piece; there are few, so they are kept."""
        found = self._last_requests.get((offset, num_bytes, immediate))
        if found is None:
            e = self._e
            opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
            found = self._request(opcode, offset, num_bytes)
            found.imm_data = immediate or 0
            self._last_requests[offset, num_bytes, immediate] = found
        return found

    def _request(self, opcode: int, offset: int, num_bytes: int) -> Any:
        assert self._peer is not None
        source = self._source  # is copied
        source.addr, source.length = self._outgoing_address + offset, num_bytes
        request = self._wr.SendWR(opcode=opcode, num_sge=1, sg=[source], send_flags=0)
        request.set_wr_rdma(self._peer.window_key, self._peer.window_address + offset)
        return request

    @property
    def is_idle(self) -> bool:
        """Returns whether the peer has all that was written, if the last write reports."""
        return self._num_completed == self._num_posted

    def reap(self) -> int:
        """Takes completions and returns how many messages have arrived. Raises PeerLostError if a
        write did not reach the peer, and TransportError if it was refused."""
        num_arrived, arrived = self._received.poll(16)
        flushed = None
        for completion in arrived:
            if completion.status != self._e.IBV_WC_SUCCESS:
                flushed = completion  # because of a failed write, or because the peer ended it
                break
            self.pair.post_recv(self._receive)
            self.num_arrived += completion.imm_data != 0
        count, sent = self._sent.poll(4)
        while count:
            for completion in sent:
                self._check(completion)
                self._num_completed = completion.wr_id
            count, sent = self._sent.poll(4)
        if flushed is not None:
            self._check(flushed)
        return int(num_arrived)

    def _check(self, completion: Any) -> None:
        if completion.status == self._e.IBV_WC_SUCCESS:
            return
        what = pyverbs("cq").cqe_status_to_str(completion.status)
        lost = (self._e.IBV_WC_RETRY_EXC_ERR, self._e.IBV_WC_WR_FLUSH_ERR)
        kind = PeerLostError if completion.status in lost else TransportError
        raise kind(f"the queue pair is in error: {what}")

    def arm(self) -> bool:
        """Makes `event_fd` readable at the next arrival; returns False if one is there already."""
        self._received.req_notify()
        return self.reap() == 0

    def disarm(self) -> None:
        """Ends a wait that `arm` began, whether a message arrived or not."""
        if self._event.poll(0):
            self._channel.get_cq_event(self._received)
            self._received.ack_events(1)

    def close(self) -> None:
        for request in self._last_requests.values():
            request.close()
        for thing in (
            self.pair,
            self._sent,
            self._received,
            self._channel,
            self._window,
            self._outgoing,
            self.domain,
            self.context,
        ):
            if thing is not None:
                thing.close()


_opening_channel = threading.Lock()


def _completion_channel(cq: Any, context: Any) -> tuple[Any, int]:
    """Makes a completion channel and finds its descriptor, which older releases do not expose."""
    with _opening_channel:
        before = _event_files()
        channel = cq.CompChannel(context)
        after = _event_files()
    return channel, getattr(channel, "fd", 0) or (after - before).pop()


def _event_files() -> set[int]:
    """Returns the descriptors of completion channels and the like in this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # the descriptor of the listing itself
            pass
    return found
