"""vLLM's published types of K/V events, as its subscribers decode them with msgspec.

After the example `kv_events_subscriber.py` of vLLM (Apache-2.0): `Early` has the fields of 0.9,
`Late` those of the last version that writes events as arrays, and `Latest` those of vLLM 0.33,
which writes them as maps. Decoding checks every type strictly, and refuses an unknown kind or a
missing field.
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


map_options: dict[str, Any] = {"omit_defaults": True, "gc": False}


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


class Latest:
    class BlockStored(Struct, tag="BlockStored", **map_options):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None
        locality: str | None = None
        ownership: str | None = None
        session_id: str | None = None
        lookahead_token_ids: list[list[int]] | None = None

    class BlockRemoved(Struct, tag="BlockRemoved", forbid_unknown_fields=True, **map_options):
        block_hashes: list[int | bytes]
        medium: str | None
        group_idx: int | None = None
        locality: str | None = None
        ownership: str | None = None

    class AllBlocksCleared(Struct, tag="AllBlocksCleared", **map_options):
        pass


EarlyEvent = Early.BlockStored | Early.BlockRemoved | Early.AllBlocksCleared
LatestEvent = Latest.BlockStored | Latest.BlockRemoved | Latest.AllBlocksCleared
LateEvent = Late.BlockStored | Late.BlockRemoved | Late.AllBlocksCleared


class EarlyBatch(Struct, **type_options):
    ts: float
    events: list[EarlyEvent]


class LateBatch(Struct, **type_options):
    ts: float
    events: list[LateEvent]
    data_parallel_rank: int | None = None


class LatestBatch(Struct, **type_options):
    ts: float
    events: list[LatestEvent]
    data_parallel_rank: int | None = None


early = Decoder(EarlyBatch)
late = Decoder(LateBatch)
latest = Decoder(LatestBatch)
