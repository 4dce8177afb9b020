"""Groups whose tensor ranks exchange results over connections, as on several hosts."""

from __future__ import annotations

import pytest

from ops.cpu import native_library
from tests.serve.group.test_group_engine import on_grid
from tests.support.group.thread_workers import thread_workers  # noqa: F401

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SETTINGS = {"dtype": "int8", "kv_cache_bytes": 1 << 20, "group_exchange": "connections"}


@pytest.mark.small_pages
@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=str)
def test_ranks_give_the_tokens_of_one(thread_workers, grid):  # noqa: F811
    alone, _ = on_grid("llama", "base", (1, 1), 6, count=4, **SETTINGS)
    found, _ = on_grid("llama", "base", grid, 6, count=4, **SETTINGS)
    assert found == alone
