"""pyverbs with mlx5 devices that are connected to each other in this process. A write of a queue
pair goes at once to memory that its peer has registered for it; anything else is an AssertionError.
What a program opens is in `open` until it is closed."""

from __future__ import annotations

import ctypes
import os
from itertools import count
from types import ModuleType, SimpleNamespace

from tests.support.cuda.fakes_gpu_rdma import FakeNic

CONSTANTS = {
    name: number
    for number, name in enumerate(
        (
            "IBV_PORT_ACTIVE",
            "IBV_LINK_LAYER_ETHERNET",
            "IBV_GID_TYPE_ROCE_V2",
            "IBV_QPT_RC",
            "IBV_WR_RDMA_WRITE",
            "IBV_WR_RDMA_WRITE_WITH_IMM",
            "IBV_WC_RETRY_EXC_ERR",
            "IBV_WC_WR_FLUSH_ERR",
            "IBV_WC_REM_ACCESS_ERR",
        ),
        start=1,
    )
} | {
    "IBV_WC_SUCCESS": 0,
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 2,
    "IBV_SEND_SIGNALED": 2,
    "IBV_SEND_INLINE": 8,
}
GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"


class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


class Plain(SimpleNamespace):
    """A structure that only holds what it is made from."""

    def __init__(self, *_, **values) -> None:
        super().__init__(**values)


class FakeVerbs:
    """`modules` are those of pyverbs by name."""

    def __init__(self) -> None:
        self.open: set[object] = set()
        self.fails: set[str] = set()
        """Names of classes and methods that raise."""
        self.vendor = 0x02C9
        self.is_ordered = True
        self.has_pair_address = True
        self.num_blocks = 16  # of a send queue that a stream uses
        self.nics: list[FakeNic] = []
        self.read_device = None
        """Reads device memory: (address, num_bytes)."""
        self.pairs: dict[int, _Pair] = {}
        self.regions: dict[int, _Region] = {}
        self.numbers = count(100)
        contents = {
            "enums": CONSTANTS,
            "device": {
                "get_device_list": lambda: [SimpleNamespace(name=b"mlx5_0")],
                "Context": self._maker(_Context),
            },
            "pd": {"PD": self._maker(_Thing)},
            "cq": {
                "CompChannel": self._maker(_Channel),
                "CQ": self._maker(_Queue),
                "cqe_status_to_str": str,
            },
            "qp": {
                "QP": self._maker(_Pair),
                "QPCap": Plain,
                "QPInitAttr": Plain,
                "QPAttr": Plain,
            },
            "mr": {"MR": self._maker(_Region), "MREx": self._maker(_Region)},
            "wr": {"SGE": _Piece, "RecvWR": Plain, "SendWR": _Send},
            "addr": {"GID": Plain, "GlobalRoute": Plain, "AHAttr": Plain},
            "pyverbs_error": {"PyverbsError": PyverbsError, "PyverbsRDMAError": PyverbsRDMAError},
        }
        self.modules = {"pyverbs": ModuleType("pyverbs")}
        for name, values in contents.items():
            self.modules[f"pyverbs.{name}"] = module = ModuleType(f"pyverbs.{name}")
            vars(module).update(values)

    def _maker(self, kind):
        return lambda *arguments, **settings: kind(self, *arguments, **settings)

    def check(self, name: str) -> None:
        if name in self.fails:
            raise PyverbsRDMAError(f"{name} failed", 12)

    def direct(self, objects, kind) -> int:
        """Stands in for mlx5dv_init_obj: from then on the queue pair sends by doorbells."""
        [pair] = [pair for pair in self.pairs.values() if pair.qp == objects._obj[0]]
        pair.nic = nic = FakeNic(self.num_blocks)
        nic.NUMBER, nic.PAIR = pair.qp_num, pair.qp
        nic.peer = {key: _Reach(self, pair, key) for key in self.regions}
        nic.read_local = dict.fromkeys(self.regions, self.read_device)
        self.nics.append(nic)
        return nic.direct(objects, kind)

    def store(self, pair: _Pair, key: int, address: int, data: bytes) -> None:
        """Writes to the peer of a queue pair."""
        region = self.regions[key]
        peer = self.pairs[pair.peer]
        assert region.domain is peer.domain and region.access & 2, "not for this peer"
        assert region.address <= address <= region.address + region.num_bytes - len(data)
        ctypes.memmove(address, data, len(data))


class _Reach:
    """A peer's memory as FakeNic writes it, at the peer's own addresses."""

    def __init__(self, verbs: FakeVerbs, pair: _Pair, key: int) -> None:
        self._verbs, self._pair, self._key = verbs, pair, key

    def __len__(self) -> int:
        return (1 << 63) - 1

    def __setitem__(self, span: slice, data: bytes) -> None:
        self._verbs.store(self._pair, self._key, span.start, data)


class _Thing:
    """Something that is open until it, or its context, is closed."""

    def __init__(self, verbs: FakeVerbs, parent: _Thing | None, *_) -> None:
        self.verbs = verbs
        self.context = self if parent is None else parent.context
        verbs.check(type(self).__name__)
        verbs.open.add(self)

    def close(self) -> None:
        self.verbs.check(f"{type(self).__name__}.close")
        self.verbs.open.discard(self)


class _Context(_Thing):
    def __init__(self, verbs: FakeVerbs, name: str) -> None:
        assert name == "mlx5_0"
        super().__init__(verbs, None)

    def query_device(self):
        self.verbs.check("query_device")
        return SimpleNamespace(vendor_id=self.verbs.vendor, phys_port_cnt=1)

    def query_gid_table(self, most: int):
        kind = CONSTANTS["IBV_GID_TYPE_ROCE_V2"]
        return [SimpleNamespace(port_num=1, gid_index=3, gid_type=kind)]

    def query_port(self, number: int):
        return SimpleNamespace(
            state=CONSTANTS["IBV_PORT_ACTIVE"],
            link_layer=CONSTANTS["IBV_LINK_LAYER_ETHERNET"],
            lid=0,
            active_mtu=5,
            max_msg_sz=1 << 30,
        )

    def query_gid(self, number: int, index: int) -> str:
        return GID

    def close(self) -> None:
        for thing in [x for x in self.verbs.open if x.context is self and x is not self]:
            thing.close()
        super().close()


class _Channel(_Thing):
    def __init__(self, verbs: FakeVerbs, context: _Context) -> None:
        super().__init__(verbs, context)
        self._file = os.fdopen(os.eventfd(0), "rb", buffering=0)
        self.fd = self._file.fileno()

    def close(self) -> None:
        super().close()
        self._file.close()


class _Queue(_Thing):
    """A completion queue."""

    def __init__(self, verbs: FakeVerbs, context: _Context, num_entries: int, *_) -> None:
        super().__init__(verbs, context)
        self._num_entries = num_entries
        self.completions: list[SimpleNamespace] = []
        self.nic: FakeNic | None = None
        self._num_seen = 0

    def add(self, wr_id: int, status: int = 0) -> None:
        self.completions.append(SimpleNamespace(wr_id=wr_id, status=status, imm_data=0))

    def poll(self, most: int):
        if self.nic is not None:
            while self._num_seen < self.nic.num_completions:
                self._num_seen += 1
                self.add(0)
        assert len(self.completions) <= self._num_entries, "the completion queue overran"
        found, self.completions = self.completions[:most], self.completions[most:]
        return len(found), found


class _Region(_Thing):
    """MR and MREx."""

    def __init__(self, verbs: FakeVerbs, domain, num_bytes, access, address=0, **dma) -> None:
        super().__init__(verbs, domain)
        if dma:
            os.fstat(dma["fd"])
        self.domain, self.num_bytes, self.access = domain, num_bytes, access
        self.address = address or dma["iova"]
        self.rkey = self.lkey = next(verbs.numbers)
        verbs.regions[self.rkey] = self

    def close(self) -> None:
        super().close()
        self.verbs.regions.pop(self.rkey, None)


class _Piece(SimpleNamespace):
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        super().__init__(addr=addr, length=length, lkey=lkey)


class _Send:
    def __init__(self, opcode: int, num_sge: int, sg, send_flags: int) -> None:
        self.opcode, self.send_flags, self.next_wr, self.wr_id = opcode, send_flags, None, 0
        self.piece = _Piece(sg[0].addr, sg[0].length, sg[0].lkey)

    def set_wr_rdma(self, key: int, address: int) -> None:
        self.key, self.address = key, address

    def close(self) -> None:
        pass


class _Pair(_Thing):
    def __init__(self, verbs: FakeVerbs, domain, init, attributes) -> None:
        super().__init__(verbs, domain)
        self.domain, self._sent = domain, init.scq
        self.qp_num = next(verbs.numbers)
        if verbs.has_pair_address:
            self.qp = 0xC0FFEE0000 + self.qp_num
        verbs.pairs[self.qp_num] = self
        self.peer, self.num_receives = 0, 0

    @property
    def nic(self) -> FakeNic | None:
        return self._sent.nic

    @nic.setter
    def nic(self, nic: FakeNic) -> None:
        self._sent.nic = nic

    def to_init(self, attributes) -> None:
        self.peer = attributes.dest_qp_num

    def post_recv(self, request) -> None:
        self.num_receives += 1

    def to_rts(self, attributes) -> None:
        self.verbs.check("to_rts")

    def query_data_in_order(self, opcode: int, flags: int) -> int:
        assert opcode == CONSTANTS["IBV_WR_RDMA_WRITE"]
        return int(self.verbs.is_ordered)

    def post_send(self, request) -> None:
        assert self.nic is None, "this queue pair sends by doorbells"
        while request is not None:
            piece = request.piece
            region = self.verbs.regions[piece.lkey]
            assert region.domain is self.domain
            assert region.address <= piece.addr
            assert piece.addr + piece.length <= region.address + region.num_bytes
            data = ctypes.string_at(piece.addr, piece.length)
            is_lost = self.peer not in self.verbs.pairs
            if not is_lost:
                self.verbs.store(self, request.key, request.address, data)
            if is_lost or request.send_flags & CONSTANTS["IBV_SEND_SIGNALED"]:
                status = CONSTANTS["IBV_WC_RETRY_EXC_ERR"] if is_lost else 0
                self._sent.add(request.wr_id, status)
            request = request.next_wr

    def close(self) -> None:
        super().close()
        self.verbs.pairs.pop(self.qp_num, None)
