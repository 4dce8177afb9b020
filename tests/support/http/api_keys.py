"""API keys of two clients, alice and bob."""

from __future__ import annotations

from pathlib import Path

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdefgh"
KEYS = (f"alice:{ALICE}", f"bob:{BOB}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)
