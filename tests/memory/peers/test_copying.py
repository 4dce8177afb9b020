"""A link copies the pages of its peer's running sequences, whatever the peer says or does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.peers import copying, page_server
from memory.peers.jobs import NewsJob, PullJob
from memory.peers.page_copies import PageCopies
from memory.peers.wire import (
    HEADER_BYTES,
    MAX_NEWS,
    Kind,
    PageChecksums,
    header,
    pack_news,
    read_header,
    read_names,
)
from memory.prefix.sequence_names import FOLLOWER_S, SequenceNames
from tests.support.memory.peer_rig import (
    PAGE,
    SECRET,
    Holder,
    Puller,
    RawPeer,
    connect,
    content_of,
    name_of,
    wait_for,
)
from transport.base import Endpoint, TransportError
from transport.messages import post_bytes


@pytest.fixture(autouse=True)
def copying_is_quick(monkeypatch):
    monkeypatch.setattr(copying, "SHARE", 0.9)
    monkeypatch.setattr(copying, "NEWS_S", 0.01)


def run(holder: Holder, sequence: str, *numbers: int) -> None:
    """Queues a sequence whose pages are these, and computes them."""
    holder.names.queued(sequence, [name_of(number) for number in numbers])
    holder.names.computed(sequence, len(numbers))


def here(copies: PageCopies, *numbers: int) -> list[int]:
    return [number for number in numbers if copies.contains(name_of(number))]


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
def test_pages_of_running_sequences_are_copied_and_outlive_their_engine(close_all, scheme):
    holder, copies = Holder(8, scheme=scheme), PageCopies(PAGE, 8 * PAGE)
    run(holder, "a", 1, 2, 3)
    puller = Puller(holder.server.url, copies=copies)
    third = Holder(0, copies=copies)  # what the puller serves
    other = Puller(third.server.url)
    close_all += [puller.store, other.store, third.server]
    wait_for(lambda: here(copies, 1, 2, 3) == [1, 2, 3])
    assert here(copies, 4) == []
    run(holder, "b", 1, 5)
    wait_for(lambda: here(copies, 5) == [5])
    assert puller.stats().pulled == 4, "what is here is not pulled again"
    holder.names.ended("b")
    holder.server.close(5.0)
    wait_for(lambda: not puller.links[0].is_ready)
    assert puller.store.contains(name_of(5)) and not puller.store.contains(name_of(4))
    assert puller.load(1, 2, 3, 5, 4) == [True] * 4 + [False]
    assert puller.pages.read(3) == content_of(3)[:PAGE]
    other.wait_until_ready()
    assert other.ask(1, 4, 5) == [1, 5]
    assert other.load(1, 5) == [True, True]
    assert other.pages.read(5) == content_of(5)[:PAGE]
    found = puller.store.stats().peers.copies
    assert (found.pages, found.copied, found.num_bytes) == (4, 4, 4 * PAGE)
    copies.check_integrity()


def test_a_page_that_was_evicted_meanwhile_is_not_copied(close_all):
    holder, copies = Holder(4), PageCopies(PAGE, 8 * PAGE)
    run(holder, "a", 1, 77, 2)
    puller = Puller(holder.server.url, copies=copies)
    close_all += [puller.store, holder.server]
    wait_for(lambda: puller.stats().missing == 1)
    run(holder, "b", 3)
    wait_for(lambda: here(copies, 3) == [3])
    assert puller.stats().is_connected
    copies.check_integrity()


def asked_for_news(clock: Callable[[], float]) -> tuple[copying.Copying, NewsJob]:
    """Returns a link, and its question, which has been answered by the names of eight pages."""
    link = copying.Copying("a", PageCopies(PAGE, 8 * PAGE), clock=clock)
    job = link.next_job()
    assert isinstance(job, NewsJob)
    job.on_news([(1, name_of(number)) for number in range(8)])
    return link, job


def test_copying_takes_its_share_of_the_time(monkeypatch):
    monkeypatch.setattr(copying, "SHARE", 0.1)
    monkeypatch.setattr(copying, "NEWS_S", 1.5)
    now_s = 10.0
    link, job = asked_for_news(lambda: now_s)
    link.took(job, 0.02)
    now_s = 10.17
    assert link.next_job() is None
    assert link.due_in_s() == pytest.approx(0.01)
    now_s = 10.19
    pull = link.next_job()
    assert isinstance(pull, PullJob) and len(pull.pages) == 4
    link.took(pull, 1.0)
    now_s = 11.4
    assert link.next_job() is None
    assert link.due_in_s() == pytest.approx(0.1)


def test_questions_are_in_time_while_it_rests_after_a_slow_pull(monkeypatch):
    monkeypatch.setattr(copying, "SHARE", 0.05)
    monkeypatch.setattr(copying, "NEWS_S", 0.1)
    now_s = 10.0
    link, job = asked_for_news(lambda: now_s)
    pull = link.next_job()
    assert isinstance(pull, PullJob)
    link.took(pull, 4.0)  # it rests for 76 s
    for _ in range(50):
        now_s += link.due_in_s()
        job = link.next_job()
        assert isinstance(job, NewsJob)
        link.took(job, 0.3)  # slow ones, too
    assert (now_s - 10.0) / 50 <= FOLLOWER_S / 2
    monkeypatch.setattr(copying, "_MAX_PENDING", 1)
    assert link.due_in_s() > 76.0, "no room for names"


def test_a_follower_that_was_late_does_not_keep_its_copies_for_ever():
    """Three engines: one runs a sequence, two follow it, the first of them late."""
    now_s = 0.0
    names = SequenceNames(lambda page: page + 1, min_age_s=0.0, clock=lambda: now_s)
    copies = PageCopies(PAGE, 4 * PAGE, kept_s=60.0, clock=lambda: now_s)
    late = copying.Copying("a", copies, clock=lambda: now_s)

    def follow() -> None:
        while (job := late.next_job()) is not None:
            if isinstance(job, NewsJob):
                job.on_news(names.news("late", job.most))
            else:
                for future in job.futures:
                    future.set_result(True)

    names.queued("a", [name_of(number) for number in range(1, 5)])
    names.computed("a", 4)
    follow()
    assert copies.stats().pages == 4
    now_s += FOLLOWER_S + 0.5
    names.news("other", 100)
    follow()
    names.ended("a")
    names.queued("b", [name_of(number) for number in range(10, 14)])
    names.computed("b", 4)
    now_s += 1.0
    names.leave("other")
    follow()
    assert here(copies, *range(20)) == [10, 11, 12, 13], "what it lost makes room"
    copies.check_integrity()


def test_copies_expire_while_no_peer_is_there(close_all):
    holder, copies = Holder(8), PageCopies(PAGE, 8 * PAGE, kept_s=0.3)
    run(holder, "a", 1, 2)
    puller = Puller(holder.server.url, copies=copies)
    close_all.append(puller.store)
    wait_for(lambda: here(copies, 1, 2) == [1, 2])
    holder.server.close(5.0)
    wait_for(lambda: not puller.links[0].is_ready)
    wait_for(lambda: copies.stats().pages == 0)


def test_a_pull_comes_before_copying(close_all):
    holder, copies = Holder(16), PageCopies(PAGE, 64 * PAGE)
    puller = Puller(holder.server.url, copies=copies)
    close_all += [puller.store, holder.server]
    puller.wait_until_ready()
    run(holder, "a", *range(1, 16))
    assert puller.ask(1, 2) == [1, 2]
    assert puller.load(1, 2) == [True, True]
    wait_for(lambda: here(copies, *range(16)) == list(range(1, 16)))


# ---- peers that are followed


class Followed(RawPeer):
    """A peer whose answers to NEWS and to GET are those of a test."""

    def __init__(
        self,
        news: Callable[[int, int], bytes | None],
        page: Callable[[int, int, bytes], bytes | None],
    ) -> None:
        self._news, self._page = news, page
        self.num_asked = 0
        super().__init__()

    def _answer(self, endpoint: Endpoint, message: bytes) -> None:
        kind, number, most = read_header(memoryview(message))
        if kind == Kind.NEWS:
            self.num_asked += 1
            answers = [self._news(number, most)]
        else:
            names = read_names(memoryview(message))[2]
            answers = [self._page(number, index, name) for index, name in enumerate(names)]
        for answer in answers:
            if answer is not None:
                post_bytes(endpoint, answer)


def absent(number: int, index: int, name: bytes) -> bytes:
    return header(Kind.PAGE, number, index)


NEWS: dict[str, Callable[[int, int], bytes | None]] = {
    "more names than were asked for": lambda number, most: pack_news(
        number, [(1, name_of(n)) for n in range(most + 1)]
    ),
    "names that do not come": lambda number, most: header(Kind.NEW, number, 5),
    "another request's": lambda number, most: pack_news(number + 1, []),
    "another kind": lambda number, most: header(Kind.HAVE, number, 0),
    "a few bytes": lambda number, most: b"abc",
}


@pytest.mark.parametrize("what", NEWS)
def test_wrong_news_end_the_connection(close_all, what):
    peer, copies = Followed(NEWS[what], absent), PageCopies(PAGE, 4 * PAGE)
    puller = Puller(peer.url, copies=copies)
    close_all += [puller.store, peer]
    wait_for(lambda: puller.stats().refused == 1)
    assert copies.stats().pages == 0


def test_endless_names_take_bounded_memory_and_the_peers_pages_are_still_pulled(close_all):
    told: list[int] = []

    def news(number: int, most: int) -> bytes:
        told.append(most)
        first = sum(told)
        pages = [((first + n) % 999_999, name_of(first + n)) for n in range(most)]
        return pack_news(number, pages)

    checksums = PageChecksums(SECRET)

    def page(number: int, index: int, name: bytes) -> bytes:
        content = content_of(1)[:PAGE]
        return header(Kind.PAGE, number, index) + checksums.of(name, memoryview(content)) + content

    peer, copies = Followed(news, page), PageCopies(PAGE, 8 * PAGE)
    puller = Puller(peer.url, copies=copies)
    close_all += [puller.store, peer]
    wait_for(lambda: copies.stats().declined > 2000, 20.0)
    assert max(told) <= MAX_NEWS
    link = puller.links[0]._copying
    assert len(link._pending) <= 4096 + MAX_NEWS
    assert copies.stats().pages == 8
    assert len(copies._streams) <= 32 and len(copies._declined) <= 1024
    assert puller.stats().is_connected
    copies.check_integrity()


def test_names_whose_pages_never_come_take_no_memory(close_all):
    first = [0]

    def news(number: int, most: int) -> bytes:
        first[0] += 20
        return pack_news(number, [(first[0], name_of(first[0] + n)) for n in range(20)])

    peer, copies = Followed(news, absent), PageCopies(PAGE, 8 * PAGE)
    puller = Puller(peer.url, copies=copies)
    close_all += [puller.store, peer]
    wait_for(lambda: puller.stats().missing > 50)
    peer.close()
    puller.store.close(5.0)
    assert copies.stats().pages == 0
    copies.check_integrity()


def test_a_page_under_a_wrong_name_is_not_kept(close_all):
    checksums = PageChecksums(SECRET)
    content = content_of(1)[:PAGE]

    def page(number: int, index: int, name: bytes) -> bytes:
        wrong = checksums.of(name_of(99), memoryview(content))
        return header(Kind.PAGE, number, index) + wrong + content

    peer = Followed(lambda number, most: pack_news(number, [(1, name_of(1))]), page)
    copies = PageCopies(PAGE, 4 * PAGE)
    puller = Puller(peer.url, copies=copies)
    close_all += [puller.store, peer]
    wait_for(lambda: puller.stats().refused == 1)
    assert copies.stats().pages == 0 and not copies.contains(name_of(1))


def test_a_silent_peer_is_left(close_all, monkeypatch):
    peer = Followed(lambda number, most: None, absent)
    puller = Puller(peer.url, copies=PageCopies(PAGE, 4 * PAGE))
    close_all += [puller.store, peer]
    wait_for(lambda: puller.stats().lost == 1)


# ---- peers that follow


def test_a_follower_that_never_takes_pages_costs_nothing(close_all):
    holder = Holder(8)
    close_all.append(holder.server)
    endpoint = connect(holder.server.url)
    for number in range(30):
        run(holder, f"s{number}", number % 8)
        post_bytes(endpoint, header(Kind.NEWS, number, MAX_NEWS))
        frame = endpoint.poll(2.0)
        assert frame is not None
        endpoint.release(frame)
    for number in range(30):
        holder.names.ended(f"s{number}")
    assert holder.server.snapshot().served == 0
    endpoint.close()
    wait_for(lambda: holder.names.num_followers == 0)
    assert not holder.names._sequences and not holder.names._running


@pytest.mark.parametrize("most", [0, MAX_NEWS + 1])
def test_a_wrong_question_for_news_bars_the_peer(close_all, most):
    holder = Holder(2)
    close_all.append(holder.server)
    endpoint = connect(holder.server.url)
    post_bytes(endpoint, header(Kind.NEWS, 1, most))
    wait_for(lambda: endpoint.is_lost)
    wait_for(lambda: holder.server.snapshot().refused == 1)


def test_endless_questions_for_news_are_refused(close_all, monkeypatch):
    monkeypatch.setattr(page_server, "NAMES_PER_S", 500)
    holder = Holder(2)
    close_all.append(holder.server)
    endpoint = connect(holder.server.url)
    answers: list[int] = []

    def ask_on() -> None:
        while len(answers) < 5000:
            post_bytes(endpoint, header(Kind.NEWS, len(answers), 10))
            frame = endpoint.poll(2.0)
            assert frame is not None and frame.num_bytes == HEADER_BYTES
            endpoint.release(frame)
            answers.append(1)

    with pytest.raises(TransportError):
        ask_on()
    assert 100 < len(answers) < 5000
    wait_for(lambda: holder.server.snapshot().refused == 1)
