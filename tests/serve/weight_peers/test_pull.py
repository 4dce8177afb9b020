"""The bytes of packed weights travel whole, whatever a peer does."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.native_stored import NUM_BUFFERS
from serve.models.packed_cache.layout import (
    CHUNK_BYTES,
    DATA_START,
    DamagedCache,
    Index,
    Span,
    chunks_of,
    read_index,
)
from serve.models.packed_cache.region import huge_pages
from serve.weight_peers import link as links
from serve.weight_peers import pull as pulls
from serve.weight_peers.link import WeightLink
from serve.weight_peers.pull import Pull, PullFailed
from serve.weight_peers.server import WINDOW_BYTES
from serve.weight_peers.wire import (
    HEADER_BYTES,
    Area,
    Header,
    Kind,
    WeightProtocolError,
    digest_of,
    pack_header,
    read_header,
)
from tests.support.models.weight_replicas import END, KEY, connected, end_of, pull, serving
from transport import listen
from transport.base import Endpoint, TransportError
from transport.messages import post_bytes, view_of

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_all_bytes_come_and_the_index_with_them(
    scheme: str, tmp_path: Path, index: Index, data: torch.Tensor
) -> None:
    url = {
        "inproc": f"inproc://{tmp_path}",
        "shm": f"shm://{tmp_path}/w",
        "tcp": "tcp://127.0.0.1:0",
    }[scheme]
    with serving(url, index, data) as server:
        link = connected(server.url)
        found = link.describe(object)
        content = link.fetch(Area.INDEX, found.index_place)
        place = Span(found.data_end, len(content))
        assert read_index(content, bytes.fromhex(found.index_place[1]), place) == index
        assert link.fetch(Area.TABLE, found.table_place) == b"{}"
        made = Pull(index)
        got = made.run([link], object)
        assert torch.equal(got[DATA_START:], data[DATA_START:])
        assert made.num_repeated == 0 and made.done_bytes == made.num_bytes
        assert server.snapshot().served_bytes == made.num_bytes + len(content) + 2


def test_several_peers_share_the_work(tmp_path: Path, index: Index, data: torch.Tensor) -> None:
    rate = 100 << 20
    with (
        serving(f"inproc://{tmp_path}/1", index, data, rate) as first,
        serving(f"inproc://{tmp_path}/2", index, data, rate) as second,
    ):
        assert torch.equal(pull(index, first.url, second.url).data[DATA_START:], data[DATA_START:])
        assert first.snapshot().served_bytes >= 4096
        assert second.snapshot().served_bytes >= 4096


def test_the_rate_is_kept(tmp_path: Path, index: Index, data: torch.Tensor) -> None:
    with serving(f"inproc://{tmp_path}", index, data, rate=128 << 20) as server:
        began_s = time.monotonic()
        made = pull(index, server.url)
        assert time.monotonic() - began_s > 0.8 * made.num_bytes / (128 << 20)


# -- peers that do wrong


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LATE_S", 0.5)
    monkeypatch.setattr(pulls, "_PAUSE_S", 0.01)


def damaged(data: torch.Tensor) -> torch.Tensor:
    wrong = huge_pages(END)
    wrong.copy_(data)
    wrong[DATA_START + CHUNK_BYTES + 77] ^= 1
    return wrong


def test_a_chunk_that_is_wrong_comes_from_another_peer(
    tmp_path: Path, index: Index, data: torch.Tensor, hurried: None
) -> None:
    with (
        serving(f"inproc://{tmp_path}/1", index, damaged(data), 200 << 20) as first,
        serving(f"inproc://{tmp_path}/2", index, data, 20 << 20) as second,
    ):
        made = pull(index, first.url, second.url)
    assert torch.equal(made.data[DATA_START:], data[DATA_START:])
    assert made.num_repeated >= 1


def test_wrong_chunks_alone_end_the_pull(
    tmp_path: Path, index: Index, data: torch.Tensor, hurried: None
) -> None:
    with (
        serving(f"inproc://{tmp_path}", index, damaged(data)) as server,
        pytest.raises(PullFailed, match="chunk 1 has another checksum"),
    ):
        pull(index, server.url)


def test_a_peer_that_ends_is_replaced_by_its_successor(
    tmp_path: Path, index: Index, data: torch.Tensor, hurried: None
) -> None:
    url = f"shm://{tmp_path}/w"
    made = Pull(index)
    with serving(url, index, data, 40 << 20):
        link = connected(url)
        thread = threading.Thread(target=made.run, args=([link], object))
        thread.start()
        time.sleep(0.3)
    with serving(url, index, data):
        thread.join()
    assert made.num_repeated >= 1
    assert torch.equal(made.data[DATA_START:], data[DATA_START:])


def test_a_peer_that_ends_for_good_ends_the_pull(
    tmp_path: Path, index: Index, data: torch.Tensor, hurried: None
) -> None:
    made = Pull(index)
    with serving(f"shm://{tmp_path}/w", index, data, 40 << 20) as server:
        link = connected(server.url)
        threading.Timer(0.3, server.close).start()
        assert isinstance(end_of(lambda: made.run([link], object)), PullFailed)
    assert sorted(made._todo) == list(range(len(chunks_of(END))))[-len(made._todo) :]
    assert made._num_left == len(made._todo) and made._num_peers == 0


def test_an_error_in_a_thread_ends_the_pull(
    tmp_path: Path,
    index: Index,
    data: torch.Tensor,
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an error of ours")

    with serving(f"inproc://{tmp_path}", index, data) as server:
        for owner, name in ((WeightLink, "ask"), (WeightLink, "receive"), (Pull, "_is_right")):
            with monkeypatch.context() as changed:
                changed.setattr(owner, name, fail)
                made = Pull(index)
                link = connected(server.url)
                error = end_of(lambda made=made, link=link: made.run([link], object))  # type: ignore[misc]
            assert isinstance(error, PullFailed) and "an error of ours" in str(error)
            assert len(made._todo) == made._num_left == len(chunks_of(END)), name


Answer = Callable[[Endpoint, Header], None]


@contextlib.contextmanager
def answering(url: str, answer: Answer) -> Iterator[str]:
    """A peer that knows the key and answers as it likes."""
    listener = listen(url, key=KEY, window_bytes=WINDOW_BYTES)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            endpoint = listener.accept(0.1)
            if endpoint is None:
                continue
            with contextlib.suppress(TransportError):
                while not is_over.is_set():
                    frame = endpoint.poll(0.1)
                    if frame is not None:
                        head = read_header(view_of(frame))
                        endpoint.release(frame)
                        answer(endpoint, head)
            endpoint.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.url
    finally:
        is_over.set()
        listener.close()
        thread.join()


def part(head: Header, content: bytes, **changed: int) -> bytes:
    sent = Header(Kind.PART, head.area, head.number, head.start, len(content))
    return pack_header(sent._replace(**changed)) + content


ANSWERS: dict[str, tuple[Answer, str]] = {
    "nothing": (lambda endpoint, head: None, "nothing came for"),
    "a short message": (
        lambda endpoint, head: post_bytes(endpoint, b"short"),
        "a message of 5 bytes",
    ),
    "an unknown kind": (
        lambda endpoint, head: post_bytes(endpoint, b"\x63" * HEADER_BYTES),
        "a message of kind 99",
    ),
    "no bytes": (lambda endpoint, head: post_bytes(endpoint, part(head, b"")), "0 bytes where"),
    "bytes of another place": (
        lambda endpoint, head: post_bytes(endpoint, part(head, b"x" * 64, start=head.start + 64)),
        "were due",
    ),
    "bytes of another request": (
        lambda endpoint, head: post_bytes(endpoint, part(head, b"x" * 64, number=77)),
        "were due",
    ),
    "fewer bytes than it says": (
        lambda endpoint, head: post_bytes(endpoint, part(head, b"x" * 64, num_bytes=128)),
        "were due",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_answers_that_are_not_due_end_the_pull(
    what: str, tmp_path: Path, index: Index, hurried: None
) -> None:
    answer, message = ANSWERS[what]
    with (
        answering(f"inproc://{tmp_path}", answer) as url,
        pytest.raises(PullFailed, match=message),
    ):
        pull(index, url)


def test_a_stop_ends_the_pull_at_once(tmp_path: Path, index: Index, data: torch.Tensor) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with (
        serving(f"inproc://{tmp_path}", index, data, 1 << 20) as server,
        pytest.raises(KeyboardInterrupt),
    ):
        Pull(index).run([connected(server.url)], stop)


def drop_by_drop(endpoint: Endpoint, head: Header) -> None:
    """Sends a byte at a time, never later than it may."""
    for at in range(head.start, head.start + 4096):
        post_bytes(endpoint, part(head, b"x", start=at))
        time.sleep(0.05)


def test_a_peer_that_is_too_slow_is_left(
    tmp_path: Path, index: Index, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LEAST_RATE", 64 << 20)
    with answering(f"inproc://{tmp_path}", drop_by_drop) as url:
        made, link = Pull(index), connected(url)
        error = end_of(lambda: made.run([link], object))
        assert isinstance(error, PullFailed) and "bytes came in" in str(error)
        place = (CHUNK_BYTES, "0" * 64)
        link.connect()
        error = end_of(lambda: link.fetch(Area.INDEX, place))
        link.close()
        assert isinstance(error, TransportError) and "bytes came in" in str(error)


def test_a_stop_does_not_wait_for_a_slow_peer(tmp_path: Path, index: Index) -> None:
    end_s = time.monotonic() + 1.0

    def poll() -> None:
        if time.monotonic() > end_s:
            raise KeyboardInterrupt

    with answering(f"inproc://{tmp_path}", drop_by_drop) as url:
        made, link = Pull(index), connected(url)
        assert isinstance(end_of(lambda: made.run([link], poll), 4.0), KeyboardInterrupt)
        link.connect()
        end_s = time.monotonic() + 1.0
        place = (CHUNK_BYTES, "0" * 64)
        error = end_of(lambda: link.fetch(Area.INDEX, place, poll), 4.0)
        assert isinstance(error, KeyboardInterrupt)
        link.close()


def test_an_index_that_was_changed_is_not_read(index: Index) -> None:
    content = index.to_bytes()
    with pytest.raises(DamagedCache):
        read_index(content[:-1] + b" ", b"\0" * 32, Span(END, len(content)))


NUM_CHUNKS = len(chunks_of(END))


@pytest.mark.parametrize(
    "changed",
    [
        {"checksums": dict.fromkeys(map(str, range(NUM_CHUNKS)), 1)},
        {"checksums": [1.0] * NUM_CHUNKS},
        {"checksums": [-1] * NUM_CHUNKS},
        {"checksums": [1 << 64] * NUM_CHUNKS},
        {"checksums": "1" * NUM_CHUNKS},
        {"checksums": [1] * (NUM_CHUNKS - 1)},
        {"data_end": float(END)},
        {"entries": [["x", [["tensor", "float32", [4], float(DATA_START), 16]]]]},
        {"entries": [["x", [["tensor", "float32", [4], DATA_START, 16.0]]]]},
        {"entries": [["x", [["tensor", "x\n" * 500, [4], DATA_START, 16]]]]},
        {"entries": [["x", [["layer", ["int8"], 1, 1, 1, 1, *[DATA_START, 0] * NUM_BUFFERS]]]]},
        {"entries": [["x", [["layer", "int8", 1, 1, 1, 1 << 80, *[DATA_START, 0] * NUM_BUFFERS]]]]},
    ],
)
def test_an_index_with_wrong_values_is_not_read(changed: dict[str, object], index: Index) -> None:
    content = json.dumps(json.loads(index.to_bytes()) | changed).encode()
    with pytest.raises(DamagedCache, match="its index is wrong") as raised:
        read_index(content, bytes.fromhex(digest_of(content)), Span(END, len(content)))
    assert len(str(raised.value)) < 200 and str(raised.value).isprintable()


def test_a_header_is_read_as_it_was_written() -> None:
    head = Header(Kind.GET, Area.TABLE, 7, 1 << 40, 99)
    assert read_header(memoryview(pack_header(head))) == head
    with pytest.raises(WeightProtocolError):
        read_header(memoryview(b"x" * (HEADER_BYTES - 1)))
