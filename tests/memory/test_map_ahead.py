"""Mapping ahead of need keeps the accounting right when a thread or a call fails."""

from __future__ import annotations

import threading

import pytest

from tests.support.engine.fakes import check_mapping, make_kv


def test_without_a_thread_nothing_is_mapped_ahead(monkeypatch, caplog):
    kv, memory = make_kv(in_background=True, num_ranges=2)
    old = kv.open(12)
    assert kv.grow(old, 12)
    kv.commit()
    kv.close(old)
    item = kv.open(4)
    assert kv.grow(item, 4)
    kv.commit()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    mapped = [list(kv.space.mapped(i)) for i in range(2)]
    for _ in range(2):
        kv.map_ahead([(item, 12)])
        kv.check_integrity()
        check_mapping(kv, memory)
    assert [list(kv.space.mapped(i)) for i in range(2)] == mapped
    assert caplog.text.count("mapped ahead") == 1
    assert kv.grow(item, 12)
    kv.commit()
    check_mapping(kv, memory)
    kv.close_all()


def test_pages_for_mapping_ahead_are_returned_after_an_error(monkeypatch):
    kv, _ = make_kv(in_background=True)
    item = kv.open(4)
    assert kv.grow(item, 4)
    kv.commit()
    with monkeypatch.context() as patch:
        patch.setattr(kv.space, "map_ahead", lambda places: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kv.map_ahead([(item, 12)])
    kv.check_integrity()
    assert kv.num_in_use == 1
    kv.map_ahead([(item, 12)])
    monkeypatch.setattr(kv.prefixes, "close", lambda timeout_s: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kv.close_all()
    assert kv.space._worker is None, "the thread ends before the memory is freed"
