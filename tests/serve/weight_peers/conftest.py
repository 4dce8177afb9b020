"""The packed weights that replicas exchange, and their key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve.models import told_checkpoint
from serve.models.packed_cache.layout import Index, chunks_of
from serve.models.packed_cache.region import huge_pages
from serve.weight_peers import peers
from tests.support.models.weight_replicas import END


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    made = huge_pages(END)
    made.copy_(torch.randint(0, 256, (END,), dtype=torch.uint8))
    return made


@pytest.fixture(scope="module")
def index(data: torch.Tensor) -> Index:
    checksum = native_library.library().checksum
    chunks = chunks_of(END)
    return Index(END, [], [checksum(data.data_ptr() + c.start, c.num_bytes) for c in chunks])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("a secret of the replicas")
    path.chmod(0o600)
    return path


@pytest.fixture
def nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_checkpoint, "_told", {})
    monkeypatch.setattr(peers.PeerSettings.__init__, "__defaults__", (0.0,))
