"""A hub and an empty cache for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.hub import client, transfer
from tests.support.hub.models import use_hub
from tests.support.hub.server import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


@pytest.fixture
def cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an empty cache. Commands that run here use it, and the hub."""
    monkeypatch.setattr(client, "RETRY_WAITS_S", (0.01,) * 5)
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.01,) * 5)
    return use_hub(hub, monkeypatch, tmp_path)
