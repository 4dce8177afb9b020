"""A rank in a network namespace, whose link is cut."""

from __future__ import annotations

import pytest

from bench.common.namespaces import can_have_namespaces
from bench.group.cuts import run
from ops.cpu import native_library
from tests.support.engine.checkpoints import checkpoint

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.process,
]


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=["tp", "pp"])
def test_a_link_is_cut_and_restored(grid):
    """No request fails, no token changes, nothing is left, and the rank keeps its process."""
    if (reason := can_have_namespaces()) is not None:
        pytest.skip(reason)
    found = run(str(checkpoint("llama", "tied")), grid, kills=2, kinds=("long cut", "link down"))
    assert found.faults >= 2
    assert (found.failed, found.changed, found.left) == (0, 0, {})
    assert found.whole_s
