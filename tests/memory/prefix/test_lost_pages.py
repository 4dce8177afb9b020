"""Pages whose content is lost are found by no later sequence, and nothing is counted wrong."""

from __future__ import annotations

import pytest

from memory.prefix.lost_pages import drop_pages
from tests.memory.prefix.test_prefix_copies import Copies


@pytest.mark.parametrize("is_open", [False, True])
def test_a_page_goes_with_those_that_follow_it(is_open: bool) -> None:
    rig = Copies()
    item = rig.open(80)
    lost = item.pages[7]
    if not is_open:
        rig.kv.close(item)
    drop_pages(rig.prefixes, [lost])
    rig.kv.check_integrity()
    assert rig.num_hit() == 7 * 4
    if is_open:
        rig.kv.close(item)
    drop_pages(rig.prefixes, [lost])
    rig.kv.check_integrity()
    assert rig.kv.num_in_use == 0 and rig.prefixes.num_evictable == 7


def test_what_is_computed_again_is_found_again() -> None:
    rig = Copies()
    item = rig.open(80)
    drop_pages(rig.prefixes, item.pages)
    rig.kv.close(item)
    assert rig.num_hit() == 0
    rig.kv.close(rig.open(80))
    assert rig.num_hit() == 79
