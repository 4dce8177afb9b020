"""A follower of K/V events: it subscribes, counts, and keeps an index as a router does.

It is stricter than a router: a block whose parent it does not know, a removal of what it does not
have, and a message out of order are failures, unless it has just begun.
"""

from __future__ import annotations

from typing import Any

import zmq

from tests.support.events.vllm_types import Late, Latest, early, late, latest


class Follower:
    def __init__(
        self,
        live: str,
        replay: str | None = None,
        topic: str | None = "kv@",
        *,
        as_maps: bool = False,
    ) -> None:
        """topic: None subscribes to nothing."""
        self.as_maps = as_maps
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        if topic is not None:
            self.sub.subscribe(topic)
            self.sub.connect(live.replace("0.0.0.0", "127.0.0.1"))
        self.replay_address = replay and replay.replace("0.0.0.0", "127.0.0.1")
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.salts: dict[int, str | None] = {}
        self.topic, self.last, self.num_messages = b"", -1, 0

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.destroy(linger=0)

    def follow(self, timeout_ms: int = 300) -> Follower:
        """Reads messages until none has come for a while."""
        while self.sub.poll(timeout_ms):
            self.topic, number, payload = self.sub.recv_multipart()
            self.read(int.from_bytes(number, "big"), payload)
        return self

    def read(self, number: int, payload: bytes) -> None:
        assert self.last in (-1, number - 1), f"{number} after {self.last}"
        self.last, self.num_messages = number, self.num_messages + 1
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        batch: Any = (latest if self.as_maps else late).decode(payload)
        if not self.as_maps:
            assert len(early.decode(payload).events) == len(batch.events)
        assert batch.ts > 1.7e9 and batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case Late.BlockStored() | Latest.BlockStored():
                    self.store(event)
                case Late.BlockRemoved() | Latest.BlockRemoved():
                    assert event.medium == "GPU"
                    for each in event.block_hashes:
                        del self.blocks[each]
                case _:
                    self.blocks.clear()

    def store(self, event: Late.BlockStored | Latest.BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert size == 16 and event.medium == "GPU" and event.lora_id is event.lora_name is None
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks, "an orphan"
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        for number, each in enumerate(event.block_hashes):
            assert 0 <= each < 1 << 64
            self.blocks[each] = parent, tuple(event.token_ids[number * size :][:size])
            self.salts[each] = keys[number] and keys[number][0]
            parent = each

    def ask(self, number: int) -> int:
        """Asks for the messages from a number on, as vLLM's subscriber does; returns the number of
        the answer, -1 if nothing was missed."""
        with self.context.socket(zmq.REQ) as req:
            req.connect(self.replay_address)
            req.send(number.to_bytes(8, "big"))
            assert req.poll(5000)
            frames = req.recv_multipart()
            sequence, payload = frames[-2:]
            head = [] if not self.as_maps else [b"kv@"] if payload else [b""]
            assert [frame[:3] for frame in frames[:-2]] == head
        if not payload:
            return int.from_bytes(sequence, "big", signed=True)
        self.last = int.from_bytes(sequence, "big")
        self.apply(payload)
        return self.last

    def chains(self) -> set[tuple[int, ...]]:
        """Returns the tokens of each known chain, from the first token to the end of a block."""
        return {self.tokens_to(each) for each in self.blocks}

    def tokens_to(self, block: int | None) -> tuple[int, ...]:
        if block is None:
            return ()
        parent, tokens = self.blocks[block]
        return self.tokens_to(parent) + tokens
