"""vLLM's published types of K/V events, as its subscribers decode them with msgspec.

After the example `kv_events_subscriber.py` of vLLM 0.9 to 0.11 (Apache-2.0): `Early` has the fields
of the first of these, `Late` those of the last that writes events as arrays. Decoding checks
every type strictly, and refuses an unknown kind or a missing field.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder

type_options: dict[str, Any] = {"array_like": True, "omit_defaults": True, "gc": False}


class Early:
    class BlockStored(Struct, tag="BlockStored", **type_options):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class BlockRemoved(Struct, tag="BlockRemoved", **type_options):
        block_hashes: list[int]

    class AllBlocksCleared(Struct, tag="AllBlocksCleared", **type_options):
        pass


class Late:
    class BlockStored(Struct, tag="BlockStored", **type_options):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None

    class BlockRemoved(Struct, tag="BlockRemoved", **type_options):
        block_hashes: list[int | bytes]
        medium: str | None
        group_idx: int | None = None

    class AllBlocksCleared(Struct, tag="AllBlocksCleared", **type_options):
        pass


EarlyEvent = Early.BlockStored | Early.BlockRemoved | Early.AllBlocksCleared
LateEvent = Late.BlockStored | Late.BlockRemoved | Late.AllBlocksCleared


class EarlyBatch(Struct, **type_options):
    ts: float
    events: list[EarlyEvent]


class LateBatch(Struct, **type_options):
    ts: float
    events: list[LateEvent]
    data_parallel_rank: int | None = None


early = Decoder(EarlyBatch)
late = Decoder(LateBatch)
