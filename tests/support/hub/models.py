"""Small repositories for the tests' hub, and a cache of their own."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from serve.hub.settings import HubSettings
from tests.support.engine.checkpoints import checkpoint
from tests.support.hub.server import FakeHub

WEIGHTS = bytes(range(256)) * 4096 * 3  # 3 MiB


def llama_files() -> dict[str, bytes]:
    """Returns a checkpoint that can be served, beside files that are never fetched."""
    files = {path.name: path.read_bytes() for path in checkpoint("llama").iterdir()}
    code = {"modeling_x.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b""}
    return files | code | {"original/consolidated.00.pth": b"pickle"}


def plain_files(**more: bytes) -> dict[str, bytes]:
    """Returns files of which only names and contents matter."""
    return {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": WEIGHTS} | more


def use_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """Makes the environment point at the hub and an empty cache. Returns the cache's folder."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    # these are read once, when the library is imported
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "token"))
    return home / "hub"


def settings_of(hub: FakeHub, cache: Path, **more: object) -> HubSettings:
    values = {"endpoint": hub.url, "cache": cache, "timeout_s": 5.0} | more
    return HubSettings(**values)  # type: ignore[arg-type]
