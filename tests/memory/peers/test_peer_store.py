"""Pages are pulled from peers by name: which ones, from where, and what the counters say."""

from __future__ import annotations

import time

import pytest

from memory.peers import peer_link
from memory.peers.page_copies import PageCopies
from memory.peers.peer_store import PeerStore
from memory.tiers.host_tier import HostTier
from memory.tiers.page_copy import MemoryCopier
from tests.support.memory.peer_rig import (
    IDENTITY,
    PAGE,
    Holder,
    Pages,
    Puller,
    content_of,
    name_of,
    wait_for,
)


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
def test_pages_come_as_they_are_there(close_all, scheme):
    holder = Holder(scheme=scheme)
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    assert puller.ask(3, 4, 99, 5) == [3, 4, 5]
    assert puller.load(3, 4, 5, 99) == [True, True, True, False]
    assert [puller.pages.read(number) for number in (3, 4, 5)] == [
        content_of(number)[:PAGE] for number in (3, 4, 5)
    ]
    stats = puller.stats()
    assert (stats.asked, stats.found, stats.pulled) == (4, 3, 3)
    assert stats.lost == stats.refused == 0 and stats.seconds > 0
    while holder.server.snapshot().served < 3:  # counted after they were sent
        time.sleep(0.01)


def test_an_answer_is_used_before_peers_are_asked_again(close_all):
    holder = Holder()
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    puller.ask(1, 2)
    assert puller.store.ask([name_of(1), name_of(2)]) is None
    assert puller.store.ask([name_of(1), name_of(2)]) is not None
    assert puller.store.ask([name_of(1), name_of(7)]) is not None


def test_what_the_peer_is_computing_is_told_apart_from_what_it_lacks(close_all):
    holder = Holder(2)
    holder.names.queued("a", [name_of(1), name_of(8)])
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    assert puller.ask(1, 8, 9) == [1]
    assert [puller.store.is_coming(name_of(n)) for n in (1, 8, 9)] == [False, True, False]
    holder.names.ended("a")
    puller.ask(8)
    time.sleep(0.01)
    holder.server.close(5.0)
    wait_for(lambda: not puller.links[0].is_ready)
    assert not puller.store.is_coming(name_of(8))


def test_several_peers_are_asked_at_once_and_each_gives_its_own(close_all):
    one, other = Holder(4), Holder(0)
    other.pages = Pages(1)
    other.pages.write(0, content_of(5))
    puller = Puller(one.server.url, other.server.url)
    close_all += [puller.store, one.server, other.server]
    puller.wait_until_ready()
    other.server._source._address_of = other.pages.address
    other.index.insert(name_of(5), None, 0)
    assert puller.ask(2, 5) == [2, 5]
    assert puller.load(2, 5) == [True, True]
    assert puller.pages.read(5) == content_of(5)[:PAGE]
    assert [puller.stats(i).pulled for i in (0, 1)] == [1, 1]


def test_pages_of_a_tier_below_are_served(close_all):
    tier = HostTier(PAGE, 8 * PAGE, MemoryCopier())
    source = Pages(3)
    for number in (20, 21):
        source.write(number - 20, content_of(number))
    stored = [(name_of(20), source.address(0)), (name_of(21), source.address(1))]
    assert all(future.result(5.0) for future in tier.store_many(stored))
    holder = Holder(2, below=tier)
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server, tier]
    puller.wait_until_ready()
    assert puller.ask(0, 20, 21) == [0, 20, 21]
    assert puller.load(0, 20, 21) == [True] * 3
    assert puller.pages.read(21) == content_of(21)[:PAGE]


def test_the_store_below_comes_first_and_nobody_is_asked_about_its_pages(close_all):
    holder = Holder()
    tier = HostTier(PAGE, 8 * PAGE, MemoryCopier())
    own = Pages(1)
    own.write(0, content_of(2))
    assert tier.store_many([(name_of(2), own.address(0))])[0].result(5.0)
    puller = Puller(holder.server.url, below=tier)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    assert puller.ask(2, 3) == [2, 3]
    assert puller.stats().asked == 1
    assert puller.load(2, 3) == [True, True]
    assert puller.stats().pulled == 1


def test_without_a_store_below_nothing_is_written(close_all):
    puller = Puller()
    close_all.append(puller.store)
    assert puller.store.use([name_of(1)]) == 0
    assert puller.store.store_many([]) == []
    assert puller.store.ask([name_of(1)]) is None


def test_an_evicted_page_is_a_miss(close_all):
    holder = Holder(4)
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    assert puller.ask(1, 2) == [1, 2]
    holder.index.clear()
    assert puller.load(1, 2) == [False, False]
    assert puller.stats().missing == 2
    assert puller.stats().is_connected


def test_a_page_that_leaves_the_index_while_it_is_copied_is_a_miss(close_all):
    holder = Holder(4)
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()

    def address(page: int) -> int:
        holder.index.replace(name_of(page), 3 - page)  # as another sequence's page takes its place
        return holder.pages.address(page)

    holder.index.clear()
    holder.index.insert(name_of(1), None, 1)
    holder.server._source._address_of = address
    assert puller.ask(1) == [1]
    assert puller.load(1) == [False]


def test_a_peer_that_is_gone_only_means_misses_and_is_found_again(close_all):
    holder = Holder(4, scheme="tcp")
    url = holder.server.url
    puller = Puller(url, pauses=(0.05, 0.1))
    close_all.append(puller.store)
    puller.wait_until_ready()
    assert puller.ask(1, 2) == [1, 2]
    holder.server.close(5.0)
    wait_for(lambda: not puller.links[0].is_ready)
    assert puller.ask(1, 2) == []
    assert puller.load(1) == [False]
    wait_for(lambda: puller.stats().lost == 1)
    again = Holder(4, scheme="tcp")
    puller.links[0].url = again.server.url
    close_all.append(again.server)
    puller.wait_until_ready()
    assert puller.ask(1, 3) == [1, 3]


def test_an_engine_among_its_own_peers_leaves_itself_alone(close_all):
    own = IDENTITY | {"engine": "42"}
    holder = Holder(4, identity=own)
    puller = Puller(holder.server.url, engine_id="42", pauses=(0.01, 0.01))
    close_all += [puller.store, holder.server]
    time.sleep(0.3)
    assert not puller.links[0].is_ready
    assert puller.stats().refused == puller.stats().lost == 0


def test_a_peer_with_another_model_is_refused_with_both_values(close_all, caplog):
    theirs = IDENTITY | {"precision": "bfloat16, K/V bfloat16"}
    holder = Holder(4, identity=theirs)
    puller = Puller(holder.server.url)
    close_all += [puller.store, holder.server]
    wait_for(lambda: puller.stats().refused == 1)
    assert "precision bfloat16, K/V bfloat16 there, int8, K/V int8 here" in caplog.text
    wait_for(lambda: holder.server.snapshot().refused == 1)
    assert puller.ask(1) == []


def test_a_copy_that_comes_between_two_looks_is_no_error(close_all):
    copies = PageCopies(PAGE, 4 * PAGE)
    store = PeerStore([], copies=copies)
    close_all.append(store)
    copies.place(("a", 1), name_of(1))
    contains = copies.contains

    def contains_after_this(name: bytes) -> bool:
        is_there = contains(name)
        if not is_there:
            copies.filled(name, is_there=True)
        return is_there

    copies.contains = contains_after_this
    pages = Pages(1)
    (load,) = store.load_many([(name_of(1), pages.address(0))])
    assert load.result(5.0) is False, "a miss"
    (load,) = store.load_many([(name_of(1), pages.address(0))])
    assert load.result(5.0) is True


def test_closing_ends_transfers(close_all, monkeypatch):
    monkeypatch.setattr(peer_link, "PAGE_S", 30.0)
    holder = Holder(4)
    puller = Puller(holder.server.url)
    puller.wait_until_ready()
    close_all.append(holder.server)
    holder.server._turn.acquire()  # pages do not come
    wanted = [(name_of(1), puller.pages.address(1))]
    assert puller.ask(1) == [1]
    (future,) = puller.store.load_many(wanted)
    began_s = time.monotonic()
    assert puller.store.close(5.0)
    assert future.result(0.0) is False
    assert time.monotonic() - began_s < 2.0
    holder.server._turn.release()
    assert puller.load(1) == [False]
