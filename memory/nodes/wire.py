"""The messages between engine and memory node: fixed headers and packed integers.

A message is a header of HEADER_BYTES and a body that depends on its kind, in one transport message,
whose checksum the transport has verified. Integers are little endian. Each one that arrives is
checked before it is used: its form here, its meaning in `node_session`.

    engine -> node   ATTACH   JSON: layers, pages, epoch (attach.py)
                     PLAN     edits of the address space, then the queries and appends; in a session
                              with a kv_policy also the length of each query's prompt and, if some
                              have their own, the budgets of the queries; with a stripe instead
                              what rows choose (NodePlan)
                     QUERY    q of the querying rows of one layer          [R, H, D]
                     OWN      k, then v of the querying rows of one layer  [R, Hk, D] each
                     UPDATE   k, then v of the appending rows of one layer [A, Hk, D] each
                     CHOICE   how many of the listed tiles are chosen      [R, Hk] int32
    node -> engine   ATTACHED JSON: pages granted
                     RESULT   out [R, H, D]
                     PARTIAL  out [R, H, D], then lse [R, H] fp32
                     TILES    lists of tiles of some rows (ops/cpu/native_tile_lists.py)
                     ERROR    JSON: code, text; it ends the session
                     DRAIN    empty: the node shuts down and asks the engine to leave

A node answers OWN with RESULT, attention over all keys of the querying rows, their own included. In
a session with prefix_only (attach.py) it answers QUERY with PARTIAL, attention over the keys before
the step, and there is no OWN. In a session with by_segment a range is a segment of a sequence, and
the answer is PARTIAL: some queries have rows of their own, whose k and v OWN has, and the others
attend over the whole segment; without the former there is no OWN. A layer that shares the K/V of an
earlier one has neither OWN nor UPDATE: the node answers its QUERY at once, with RESULT or PARTIAL.

In a session with a stripe (attach.py) some queries have rows that choose among the tiles of all
nodes. OWN has k and v of the rows of their sequences that are on this node, and UPDATE the others;
either may be missing. To QUERY and OWN together the node answers with TILES, as early as it can,
and to CHOICE with PARTIAL, of all querying rows. Many rows choose in parts: TILES and CHOICE come
in turn for each of them (placement.py: choosing_parts).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from memory.policies.setting import SELECTIONS, KVPolicy

VERSION = 4
MAX_JSON_BYTES = 1 << 20
_MAGIC = 0x534D  # "MS"
_HEADER = struct.Struct("<HBBIQHHIQ")  # magic version kind epoch plan layer dtype rows spare
HEADER_BYTES = _HEADER.size  # 32, so that the body is aligned
_EDIT = struct.Struct("<IIIII")
_QUERY = struct.Struct("<IIII")
_APPEND = struct.Struct("<III")
_NUMBER = struct.Struct("<I")
_BUDGET = struct.Struct("<IId")  # tokens least share; zeros: that of the session
_COUNTS = struct.Struct("<III")
_MOST_TOKENS = (1 << 32) - 1  # no sequence has as many


class WireError(Exception):
    """A message is malformed, or is not allowed at this point."""

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
    OWN = 9
    RESULT = 10
    TILES = 11
    CHOICE = 12


class ErrorCode(IntEnum):
    """The code of an ERROR message.

    FORM: not a message of this version. FULL: the node has not enough memory. STALE: the epoch
    or plan is over. RANGE: a number is outside of what was granted or mapped. SHAPE: sizes do not
    fit each other. FAULT: an error of the node itself.
    """

    FORM = 1
    FULL = 2
    STALE = 3
    RANGE = 4
    SHAPE = 5
    FAULT = 6


class WireType(IntEnum):
    """The number format of a message's rows. INT8 is bytes, then an fp32 scale for each row and
    head."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class WireFormat(NamedTuple):
    """The number formats of an engine's rows: of q and of results, and of k and v."""

    rows: WireType
    kv: WireType


FULL_WIRE = WireFormat(WireType.FLOAT32, WireType.FLOAT32)


class Header(NamedTuple):
    """The fixed-size header of a message.

    plan is the plan's number; it has 64 bits because 32 would be used up in weeks. rows is the
    number of rows in the body's tensors.
    """

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
    """Reads a message's header. Raises WireError for one that is not of this version."""
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
    """MAP maps pages from `page` on at the page slots from `slot` on of a range part. UNMAP unmaps
    these slots (page is 0). COPY copies page `slot` to `page` (part is 0). RELEASE returns the
    memory of pages from `page` on to the system (part and slot are 0)."""

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
    """num_rows rows of q attend over the first num_keys tokens of the range: their own k and v are
    the last of them, or with prefix_only come after them. In a session with by_segment num_own is
    num_rows where their own k and v are the last ones, and 0 where they belong to a later segment.
    In a session with a stripe it is num_rows where rows choose what they read: num_keys is then
    what this node has of the sequence after the step. In other sessions it is 0."""

    range: int
    num_rows: int
    num_keys: int
    num_own: int = 0


class Append(NamedTuple):
    """num_rows rows of k and v are written to the range from `position` on."""

    range: int
    num_rows: int
    position: int


class NodePlan(NamedTuple):
    """The edits are applied after all work of earlier plans and before the work of this one.
    Queries of one row come first; with by_segment those with own rows come before the others, and
    among each of them those of one row. Rows of q, k and v are in the order of these lists.
    prompt_lens: the tokens of each query's prompt, in a session whose rows after them select what
    they read (attach.py: kv_policy); in others there are none. policies: the budgets of queries
    whose rows have their own; none, for one or for all: that of the session. positions and wanted:
    in a session with a stripe, for each query whose rows choose, the position of the first one in
    its sequence; and for each such row how many tiles it chooses on all nodes, its own not
    counted."""

    edits: Sequence[Edit]
    queries: Sequence[Query]
    appends: Sequence[Append]
    prompt_lens: Sequence[int] = ()
    policies: Sequence[KVPolicy | None] = ()
    positions: Sequence[int] = ()
    wanted: Sequence[int] = ()


def pack_plan(
    epoch: int, number: int, plan: NodePlan, lane_fields: tuple[int, int] = (0, 0)
) -> bytes:
    """lane_fields: of a session with a lane (engine_lanes.py). The header has them in place of a
    layer and rows, which plans have none of."""
    slot, finished = lane_fields
    header = Header(Kind.PLAN, epoch, number, slot, rows=finished)
    counts = _COUNTS.pack(len(plan.edits), len(plan.queries), len(plan.appends))
    parts = [header.packed(), counts]
    parts += [_EDIT.pack(*edit) for edit in plan.edits]
    numbers = [number for item in (*plan.queries, *plan.appends) for number in item]
    numbers += [*plan.prompt_lens, *plan.positions, *plan.wanted]
    parts.append(struct.pack(f"<{len(numbers)}I", *numbers))
    parts += [_pack_budget(policy) for policy in plan.policies]
    return b"".join(parts)


def read_plan(message: memoryview, *, selects: bool = False, is_striped: bool = False) -> NodePlan:
    """Reads the body of a PLAN. selects: of a session with a kv_policy; is_striped: and a stripe.
    Raises WireError if its lengths disagree."""
    body = message[HEADER_BYTES:]
    if len(body) < _COUNTS.size:
        raise WireError(ErrorCode.FORM, "a plan without counts")
    num_edits, num_queries, num_appends = _COUNTS.unpack_from(body)
    ends = [_COUNTS.size]
    sizes = (num_edits, _EDIT), (num_queries, _QUERY), (num_appends, _APPEND)
    for count, item in sizes:
        ends.append(ends[-1] + count * item.size)
    if len(body) < ends[-1]:
        raise WireError(ErrorCode.FORM, f"a plan of {len(body)} bytes, not {ends[-1]} or more")
    packed = [body[ends[i] : ends[i + 1]] for i in range(3)]
    queries = [Query(*item) for item in _QUERY.iter_unpack(packed[1])]
    lengths = [num_queries if selects else 0, 0, 0]
    if is_striped:
        choosing = [query.num_own for query in queries if query.num_own]
        lengths = [0, len(choosing), sum(choosing)]
    due = ends[-1] + sum(lengths) * _NUMBER.size
    if len(body) - due not in (0, lengths[0] * _BUDGET.size):
        raise WireError(ErrorCode.FORM, f"a plan of {len(body)} bytes, not {due}")
    numbers = [number for (number,) in _NUMBER.iter_unpack(body[ends[-1] : due])]
    prompts, positions, wanted = (
        numbers[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(3)
    )
    try:
        return NodePlan(
            [Edit(EditKind(kind), *rest) for kind, *rest in _EDIT.iter_unpack(packed[0])],
            queries,
            [Append(*item) for item in _APPEND.iter_unpack(packed[2])],
            prompts,
            [_budget(*item) for item in _BUDGET.iter_unpack(body[due:])],
            positions,
            wanted,
        )
    except ValueError as error:
        raise WireError(ErrorCode.FORM, str(error)) from error


def _pack_budget(policy: KVPolicy | None) -> bytes:
    if policy is None:
        return _BUDGET.pack(0, 0, 0.0)
    tokens, least = (min(number, _MOST_TOKENS) for number in (policy.tokens or 0, policy.least))
    return _BUDGET.pack(tokens, least, policy.share or 0.0)


def _budget(tokens: int, least: int, share: float) -> KVPolicy | None:
    if not (tokens or least or share):
        return None
    if bool(tokens) is bool(share) or not least or not 0 <= share <= 1:  # nan, too
        raise ValueError(f"a budget of {tokens} tokens, {share} of all, at least {least}")
    return KVPolicy(SELECTIONS[0], tokens or None, share or None, least)


def pack_json(kind: Kind, epoch: int, content: dict[str, object]) -> bytes:
    import orjson  # imported here, so that an engine without nodes does not need it

    return Header(kind, epoch).packed() + orjson.dumps(content)


def read_json(message: memoryview) -> dict[str, object]:
    """Reads the body of an ATTACH, ATTACHED or ERROR. Raises WireError if it is not a JSON object
    or exceeds MAX_JSON_BYTES."""
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
