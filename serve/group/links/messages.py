"""The messages between the engine and its workers.

A step message has the edits of memory and the plan as flat arrays: 32 bytes an edit, 20 a sequence,
4 a row, and 8 a segment on a holder. It has no page tables, so its size does not depend on the
lengths of contexts, but for their segments. Numbers are little-endian. Both ends have proved that
they know the group's key.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memory.attention.seam import AttentionStep
from memory.edit_recorder import MemoryEdit
from transport.base import Endpoint, TransportError
from transport.messages import post_bytes

# kind, epoch, number, rows, and three counts: edits, sequences, decodes
_HEADER = struct.Struct("<IIQIIII")
HEADER_BYTES = _HEADER.size
EDIT_BYTES, SEQUENCE_BYTES, ROW_BYTES, PLACE_BYTES = 32, 20, 4, 8
NO_PLACES: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


class Kind(IntEnum):
    """What a message is. The body of those with text is a JSON object."""

    LOAD = 1  # engine: the settings, the grid, the rank's place
    PROGRESS = 2  # worker: layers loaded
    READY = 3  # worker: loaded, its free memory and where it listens
    START = 4  # engine: the K/V's geometry and the other ranks
    STARTED = 5  # worker
    STEP = 6  # engine: edits and a plan
    EDITS = 7  # engine: edits alone
    HEAD = 8  # engine: rows whose logits are wanted
    RESET = 9  # engine: a new epoch after a step that failed
    HIDDEN = 10  # rank to the same tensor rank of the next stage: hidden states
    FAILED = 11  # worker: a step failed, or the worker cannot go on
    END = 12  # engine: the group ends; without it, a lost connection is made again
    MOVED = 13  # worker: transfers of its page store that have ended
    HOLDER = 14  # engine: attach to a holder of segments, or leave it
    HELD = 15  # worker: what the holder has granted


class MessageError(Exception):
    """A message that no rank of this version sends."""


class Message(NamedTuple):
    """A message's header. body: valid until its frame is released."""

    kind: Kind
    epoch: int
    number: int
    rows: int
    counts: tuple[int, int, int]
    body: memoryview


class PlannedStep(NamedTuple):
    """A step as ranks compute it. edits: [n, 4] int64; input_ids, positions: [rows] int64; places:
    of segments on holders, [n, 2] int64 (memory/nodes/rank_links.py)."""

    edits: npt.NDArray[np.int64]
    attention: AttentionStep
    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64] = NO_PLACES


def pack(kind: Kind, epoch: int, number: int = 0, rows: int = 0, body: bytes = b"") -> bytes:
    return _HEADER.pack(kind, epoch, number, rows, 0, 0, 0) + body


def pack_json(kind: Kind, epoch: int, content: Mapping[str, object]) -> bytes:
    return pack(kind, epoch, body=json.dumps(content).encode())


def pack_step(
    epoch: int,
    number: int,
    edits: Sequence[MemoryEdit],
    attention: AttentionStep,
    input_ids: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64] = NO_PLACES,
) -> bytes:
    """Packs a STEP; input_ids: [rows]; places: as PlannedStep has them."""
    lens, rows = attention.kv_lens, attention.num_rows
    return b"".join(
        (
            _HEADER.pack(
                Kind.STEP,
                epoch,
                number,
                len(input_ids),
                len(edits),
                len(lens),
                attention.num_decodes,
            ),
            _pack_edits(edits),
            np.array(attention.starts, dtype="<i8").tobytes(),
            np.array(lens, dtype="<i8").tobytes(),
            np.array(rows, dtype="<i4").tobytes(),
            input_ids.astype("<i4").tobytes(),
            places.astype("<i4").tobytes(),
        )
    )


def pack_edits(epoch: int, edits: Sequence[MemoryEdit] | npt.NDArray[np.int64]) -> bytes:
    """Packs an EDITS."""
    return _HEADER.pack(Kind.EDITS, epoch, 0, 0, len(edits), 0, 0) + _pack_edits(edits)


def as_array(edits: Sequence[MemoryEdit]) -> npt.NDArray[np.int64]:
    """Returns edits as PlannedStep has them."""
    return np.array(edits, dtype=np.int64).reshape(len(edits), 4)


def _pack_edits(edits: Sequence[MemoryEdit] | npt.NDArray[np.int64]) -> bytes:
    return np.array(edits, dtype="<i8").tobytes() if len(edits) else b""


def read(view: memoryview) -> Message:
    """Reads a message's header. Raises MessageError."""
    if len(view) < HEADER_BYTES:
        raise MessageError(f"a message of {len(view)} bytes")
    kind, epoch, number, rows, *counts = _HEADER.unpack_from(view)
    if kind not in Kind.__members__.values():
        raise MessageError(f"a message of kind {kind}")
    edits, sequences, decodes = counts
    return Message(
        Kind(kind), epoch, number, rows, (edits, sequences, decodes), view[HEADER_BYTES:]
    )


def read_json(message: Message) -> dict[str, Any]:
    """Reads a message's JSON object. Raises MessageError."""
    try:
        content = json.loads(bytes(message.body))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{message.kind.name} without a JSON object") from error
    if not isinstance(content, dict):
        raise MessageError(f"{message.kind.name} without a JSON object")
    return content


def read_edits(message: Message) -> npt.NDArray[np.int64]:
    """Reads the edits of a STEP or EDITS, [n, 4]. Raises MessageError."""
    count = message.counts[0]
    if len(message.body) < count * EDIT_BYTES:
        raise MessageError(f"{count} edits in {len(message.body)} bytes")
    flat = np.frombuffer(message.body, dtype="<i8", count=4 * count)
    return flat.reshape(count, 4).astype(np.int64)


def read_step(message: Message) -> PlannedStep:
    """Reads a STEP. Raises MessageError for lengths that contradict one another."""
    num_edits, count, num_decodes = message.counts
    edits, at = read_edits(message), num_edits * EDIT_BYTES
    size = at + count * SEQUENCE_BYTES + message.rows * ROW_BYTES
    num_places, rest = divmod(len(message.body) - size, PLACE_BYTES)
    if num_places < 0 or rest:
        raise MessageError(f"a step of {len(message.body)} bytes instead of {size}")
    starts, kv_lens = (
        np.frombuffer(message.body, dtype="<i8", count=count, offset=at + 8 * count * part)
        for part in (0, 1)
    )
    at += 16 * count
    rows = np.frombuffer(message.body, dtype="<i4", count=count, offset=at)
    ids = np.frombuffer(message.body, dtype="<i4", count=message.rows, offset=at + 4 * count)
    places = np.frombuffer(message.body, dtype="<i4", count=2 * num_places, offset=size)
    is_wrong = not count or rows.min() < 1 or rows.sum() != message.rows or num_decodes > count
    if is_wrong or (kv_lens < rows).any() or starts.min() < 0:
        raise MessageError(f"a plan of {count} sequences and {message.rows} rows")
    ends = np.cumsum(rows)
    # row i of a sequence is at its first position + i
    firsts = np.repeat(kv_lens - ends, rows)
    return PlannedStep(
        edits,
        AttentionStep(num_decodes, starts.tolist(), rows.tolist(), kv_lens.tolist()),
        ids.astype(np.int64),
        firsts + np.arange(message.rows),
        places.astype(np.int64).reshape(num_places, 2),
    )


def post(endpoint: Endpoint, message: bytes, timeout_s: float = 10.0) -> None:
    """Posts a message. Raises TransportError, also for one that the peer's window cannot hold."""
    if len(message) > endpoint.max_message_bytes:
        raise TransportError(
            f"a message of {len(message)} bytes; the peer's window holds "
            f"{endpoint.max_message_bytes}"
        )
    post_bytes(endpoint, message, timeout_s)
