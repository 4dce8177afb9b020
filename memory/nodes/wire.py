"""What engine and memory node say to each other: fixed headers and packed integers.

A message is a header of HEADER_BYTES and what its kind says, in one transport message; the
transport has checked that the bytes are those that were sent. Little endian, as the processors
are. Every integer that arrives is checked before it is used, here for the form and in
`node_session` for the meaning.

    engine -> node   ATTACH   JSON: layers, pages, epoch (attach.py)
                     PLAN     edits of the address space, then who queries and who appends
                     QUERY    q of the querying rows of one layer          [R, H, D]
                     UPDATE   k, then v of the appending rows of one layer [A, Hk, D] each
    node -> engine   ATTACHED JSON: pages granted
                     PARTIAL  out [R, H, D], then lse [R, H] fp32
                     ERROR    JSON: code, text; the session is over
                     DRAIN    nothing: the node wants to go, please leave
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MAX_JSON_BYTES = 1 << 20
_MAGIC = 0x534D  # "MS"
_HEADER = struct.Struct("<HBBIQHHIQ")  # magic version kind epoch plan layer dtype rows spare
HEADER_BYTES = _HEADER.size  # 32: what follows is aligned
_EDIT = struct.Struct("<IIIII")
_QUERY = struct.Struct("<III")
_APPEND = struct.Struct("<III")
_COUNTS = struct.Struct("<III")


class WireError(Exception):
    """A message that is not one of ours, or not one that may come now. code: of ErrorCode."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Kind(IntEnum):
    ATTACH = 1
    ATTACHED = 2
    PLAN = 3
    QUERY = 4
    UPDATE = 5
    PARTIAL = 6
    ERROR = 7
    DRAIN = 8


class ErrorCode(IntEnum):
    """FULL: no memory (left) for it. STALE: an epoch or plan that is over. RANGE: a number
    outside of what was granted or mapped. SHAPE: sizes that do not fit each other. FORM: no
    message of this version. FAULT: the node's own."""

    FORM = 1
    FULL = 2
    STALE = 3
    RANGE = 4
    SHAPE = 5
    FAULT = 6


class WireType(IntEnum):
    """Of the numbers in a message. INT8: bytes, then an fp32 scale for each row and head."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class Header(NamedTuple):
    """plan: its number, of 64 bits, as 32 would be used up in weeks. rows: of the tensors that
    follow."""

    kind: Kind
    epoch: int
    plan: int = 0
    layer: int = 0
    dtype: WireType = WireType.FLOAT32
    rows: int = 0

    def pack_into(self, buffer: bytearray) -> None:
        _HEADER.pack_into(
            buffer,
            0,
            _MAGIC,
            VERSION,
            self.kind,
            self.epoch,
            self.plan,
            self.layer,
            self.dtype,
            self.rows,
            0,
        )

    def packed(self) -> bytes:
        buffer = bytearray(HEADER_BYTES)
        self.pack_into(buffer)
        return bytes(buffer)


def read_header(message: memoryview) -> Header:
    """WireError if it is none of this version."""
    if len(message) < HEADER_BYTES:
        raise WireError(ErrorCode.FORM, f"a message of {len(message)} bytes")
    magic, version, kind, epoch, plan, layer, dtype, rows, spare = _HEADER.unpack_from(message)
    if magic != _MAGIC or spare:
        raise WireError(ErrorCode.FORM, "not a message of a memory node")
    if version != VERSION:
        raise WireError(ErrorCode.FORM, f"version {version}, here it is {VERSION}")
    try:
        return Header(Kind(kind), epoch, plan, layer, WireType(dtype), rows)
    except ValueError as error:
        raise WireError(ErrorCode.FORM, str(error)) from error


class EditKind(IntEnum):
    """MAP: pages page.. appear at places place.. of a range part. UNMAP: they go (page: 0).
    COPY: page `place` is copied to `page` (part: 0). RELEASE: the memory of pages
    page.. goes back to the system."""

    MAP = 0
    UNMAP = 1
    COPY = 2
    RELEASE = 3


class Edit(NamedTuple):
    kind: EditKind
    part: int
    slot: int
    page: int
    num_pages: int


class Query(NamedTuple):
    """num_rows rows of q attend over the first num_keys tokens that the range holds."""

    range: int
    num_rows: int
    num_keys: int


class Append(NamedTuple):
    """num_rows rows of k and v are written at `position`.. of the range."""

    range: int
    num_rows: int
    position: int


class NodePlan(NamedTuple):
    """edits come before everything of this plan, and after everything of earlier ones. queries:
    those of one row first. Rows of q, k and v are in the order of these lists."""

    edits: Sequence[Edit]
    queries: Sequence[Query]
    appends: Sequence[Append]


def pack_plan(epoch: int, number: int, plan: NodePlan) -> bytes:
    counts = _COUNTS.pack(len(plan.edits), len(plan.queries), len(plan.appends))
    parts = [Header(Kind.PLAN, epoch, number).packed(), counts]
    parts += [_EDIT.pack(*edit) for edit in plan.edits]
    numbers = [number for item in (*plan.queries, *plan.appends) for number in item]
    parts.append(struct.pack(f"<{len(numbers)}I", *numbers))
    return b"".join(parts)


def read_plan(message: memoryview) -> NodePlan:
    """Of a PLAN, whose header was read. WireError if lengths disagree."""
    body = message[HEADER_BYTES:]
    if len(body) < _COUNTS.size:
        raise WireError(ErrorCode.FORM, "a plan without counts")
    num_edits, num_queries, num_appends = _COUNTS.unpack_from(body)
    ends = [_COUNTS.size]
    for count, item in ((num_edits, _EDIT), (num_queries, _QUERY), (num_appends, _APPEND)):
        ends.append(ends[-1] + count * item.size)
    if len(body) != ends[-1]:
        raise WireError(ErrorCode.FORM, f"a plan of {len(body)} bytes, not {ends[-1]}")
    edits, queries, appends = (body[ends[i] : ends[i + 1]] for i in range(3))
    try:
        return NodePlan(
            [Edit(EditKind(kind), *rest) for kind, *rest in _EDIT.iter_unpack(edits)],
            [Query(*item) for item in _QUERY.iter_unpack(queries)],
            [Append(*item) for item in _APPEND.iter_unpack(appends)],
        )
    except ValueError as error:
        raise WireError(ErrorCode.FORM, str(error)) from error


def pack_json(kind: Kind, epoch: int, content: dict[str, object]) -> bytes:
    import orjson  # here, so that an engine without nodes does without

    return Header(kind, epoch).packed() + orjson.dumps(content)


def read_json(message: memoryview) -> dict[str, object]:
    """Of an ATTACH, ATTACHED or ERROR. WireError if it is no JSON object, or a very long one."""
    import orjson

    body = message[HEADER_BYTES:]
    if len(body) > MAX_JSON_BYTES:
        raise WireError(ErrorCode.FORM, f"{len(body)} bytes of JSON")
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError(ErrorCode.FORM, f"no JSON: {error}") from error
    if not isinstance(content, dict):
        raise WireError(ErrorCode.FORM, "not a JSON object")
    return content
