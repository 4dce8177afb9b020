"""The packed weights that replicas exchange."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from serve.models.packed_cache.layout import Index, chunks_of
from serve.models.packed_cache.region import huge_pages
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
