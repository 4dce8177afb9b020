"""What other threads read of running sequences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memory.kv_beside_states import KVBesideStates
from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from serve.engine.core_view import CoreView
from tests.support.engine.fakes import make_kv

SIZES = {"max_model_len": 200, "max_rows": 8, "num_ranges": 6}
RECORD = LayerGroup(16, 16, window=2, read_block=16, is_state=True)
FULL = LayerGroup(64)  # 4 tokens a page


def view_of(kv: KVManager | KVBesideStates, num_tokens: int) -> CoreView:
    """Returns the view of a core that has one sequence."""
    target = kv.open(num_tokens)
    assert kv.grow(target, num_tokens)
    sequence = SimpleNamespace(
        kv_range=target, num_tokens=num_tokens, num_prompt_tokens=5, num_computed_tokens=7
    )
    scheduler = SimpleNamespace(kv=kv, running=[sequence])
    steps = SimpleNamespace(counts=None, traces=None)
    return CoreView(scheduler, steps, *[None] * 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_records", [False, True])
def test_records_in_other_memory_are_no_pages_of_a_sequence(has_records: bool) -> None:
    kv = make_kv(100, groups=(FULL,), **SIZES)[0]
    view = view_of(
        KVBesideStates([kv], make_kv(40, groups=(RECORD,), **SIZES)[0]) if has_records else kv, 40
    )
    [found] = view.sequences(3)
    assert found[1:] == (10, 40, 5, 7)


def test_all_groups_of_one_memory_count() -> None:
    groups = (FULL, LayerGroup(64, window=1000))
    [found] = view_of(make_kv(100, groups=groups, **SIZES)[0], 40).sequences(1)
    assert found.num_pages == 20
