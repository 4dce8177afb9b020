"""Random mutations of inputs, of the JSON value if there is one and otherwise of the bytes."""

from __future__ import annotations

import json
import random
from typing import Any

MAX_INPUT = 1 << 16
# Edge cases of types and bounds.
EDGES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 0.0, -0.0, 1.5, 1e308,
    -1e308, 5e-324, "", " ", "\0", "a" * 600, "\u2028", "\U0001f44d", "\ufffe", "{{7*7}}", "../..",
    "<|im_end|>", [], {}, [[]], [None], {"": None}, {"type": "object"}, [1, "a"], ["a"] * 40,
)  # fmt: skip
BYTES = (b"\0", b"\xff", b"\\ud800", b"{", b"[", b'"', b"NaN", b"1e999", b"9" * 30, b"\xef\xbb\xbf")


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Returns a mutation of `data`."""
    if rng.random() < 0.7:
        try:
            value = json.loads(data)
        except ValueError:
            pass
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = _changed(rng, value)
            return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    return _changed_bytes(rng, data)


def _changed(rng: random.Random, value: Any) -> Any:
    """Returns the value with one change somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        choice = rng.random()
        if choice < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if choice < 0.2:
            return {**value, rng.choice(["x", "__proto__", "", key + "s"]): value[key]}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        choice = rng.random()
        if choice < 0.1:
            return value[:at] + value[at + 1 :]
        if choice < 0.2:
            return value * rng.choice((2, 30))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.4:
        at = rng.randint(0, len(value))
        return value[:at] + rng.choice(["\n", "\0", "é", "<|", "x" * 70, '"']) + value[at:]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((-value, value + 1, value - 1, value * 1000, value / 3))
    if rng.random() < 0.05:
        for _ in range(rng.choice((3, 70))):
            value = [value]
        return value
    return rng.choice(EDGES)


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randint(0, len(changed))
        choice = rng.random()
        if choice < 0.4 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif choice < 0.6:
            changed[at:at] = rng.choice(BYTES)
        elif choice < 0.8:
            del changed[at : at + rng.choice((1, 4, 100))]
        else:
            end = min(len(changed), at + rng.choice((1, 8, 64)))
            changed[at:at] = changed[at:end]
    return bytes(changed)
