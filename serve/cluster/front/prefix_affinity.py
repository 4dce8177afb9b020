"""Remembers which replica has answered which beginning of a prompt, and so holds its K/V.

The text of a prompt is cut into blocks; each block's name is a hash of the text up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import orjson

BLOCK_BYTES = 256
MAX_BLOCKS = 512  # of one prompt; what follows makes no difference
MAX_NAMES = 1 << 17
_FIELDS = ("system", "instructions", "tools", "messages", "input", "prompt", "cache_salt")


def block_names(body: dict[str, Any], client: str) -> list[bytes]:
    """Returns the names of a body's blocks. client: what keeps the K/V of clients apart."""
    return names_of(prompt_text(body), client)


def prompt_text(body: dict[str, Any]) -> bytes:
    """Returns what of a body becomes a prompt. Raises TypeError if it is nested too deeply."""
    text = orjson.dumps({name: body[name] for name in _FIELDS if name in body})
    if "messages" in body:  # the last bracket moves with each turn
        text = text.rstrip(b"]}")
    return text


def names_of(text: bytes, client: str) -> list[bytes]:
    """Returns the names of the blocks of a prompt's text."""
    chain = hashlib.blake2b(client.encode("utf-8", "surrogateescape"), digest_size=8)
    names = []
    for begin in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        chain.update(text[begin : begin + BLOCK_BYTES])
        if begin + BLOCK_BYTES <= len(text):
            names.append(chain.digest())
    return names


class PrefixAffinity:
    """The replicas that have answered prompts, by the names of their blocks, at most MAX_NAMES."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def num_matching(self, names: list[bytes]) -> dict[str, int]:
        """Returns, by replica, the number of leading blocks that it answered last."""
        matching: dict[str, int] = {}
        for number, name in enumerate(names, 1):
            replica = self._replicas.get(name)
            if replica is None:
                break
            matching[replica] = number
        return matching

    def add(self, names: list[bytes], replica: str) -> None:
        for name in names:
            self._replicas[name] = replica
            self._replicas.move_to_end(name)
        while len(self._replicas) > self._max_names:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forgets a replica whose K/V is gone."""
        for name in [name for name, where in self._replicas.items() if where == replica]:
            del self._replicas[name]
