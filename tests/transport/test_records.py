"""The records of an encrypted channel, read and written by another implementation of AES-GCM."""

from __future__ import annotations

import hmac
import socket
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport.transport_peer import descriptor
from tests.support.transport.transport_rig import noise, post, take
from transport import _windows
from transport.base import CorruptMessageError, Peer, PeerLostError
from transport.endpoint import ChannelEndpoint

OURS, THEIRS = b"o" * 32, b"t" * 32
WINDOW_BYTES = 1 << 20


class Records:
    """What csrc/records.h says, for one direction."""

    def __init__(self, secret: bytes, per_key: int) -> None:
        self._secret, self._per_key, self._number = secret, per_key, 0

    def _next(self) -> tuple[AESGCM, bytes]:
        if self._number == self._per_key:
            self._secret, self._number = hmac.digest(self._secret, b"next", "sha256"), 0
        first = hmac.digest(self._secret, b"nonce", "sha256")[:12]
        nonce = int.from_bytes(first, "big") ^ self._number
        self._number += 1
        return AESGCM(hmac.digest(self._secret, b"key", "sha256")), nonce.to_bytes(12, "big")

    def sealed(self, text: bytes) -> bytes:
        cipher, nonce = self._next()
        head = len(text).to_bytes(4, "little")
        return head + cipher.encrypt(nonce, text, head)

    def opened(self, stream: bytes) -> list[bytes]:
        texts = []
        while stream:
            cipher, nonce = self._next()
            head, end = stream[:4], 20 + int.from_bytes(stream[:4], "little")
            texts.append(cipher.decrypt(nonce, stream[4:end], head))
            stream = stream[end:]
        return texts


def endpoint(sock: socket.socket, link, secrets=(OURS, THEIRS), per_key: int = 3):
    sock.setblocking(False)
    channel = _windows.SocketChannel(
        sock.detach(), WINDOW_BYTES, WINDOW_BYTES, link, secrets, per_key
    )
    return ChannelEndpoint(channel, Peer("", {}))


@pytest.fixture
def end():
    """Returns an encrypted end, and the socket of its peer."""
    near, far = socket.socketpair()
    links = _windows.Link.pair()
    made = endpoint(near, links[0])
    yield made, far
    made.close()
    far.close()


def test_another_implementation_opens_the_records(end):
    """Over several keys: one has three records here."""
    one, far = end
    records = Records(OURS, per_key=3)
    for n in range(1, 9):
        post(one, noise(1000, n))
        (text,) = records.opened(far.recv(1 << 16))
        assert text[:64] == descriptor(n, noise(1000, n), offset=text_offset(text))
        assert text[64:] == noise(1000, n)


def text_offset(text: bytes) -> int:
    return int.from_bytes(text[:8], "little")


def test_another_implementation_writes_records(end):
    one, far = end
    records = Records(THEIRS, per_key=3)
    for n in range(1, 9):
        frame = descriptor(n, noise(500, n), offset=512 * n) + noise(500, n)
        for begin in range(0, len(frame), 50):  # the descriptor, too, in several records
            far.sendall(records.sealed(frame[begin : begin + 50]))
        assert take(one) == noise(500, n)


def test_a_record_of_the_largest_size_and_one_byte_more(end):
    one, far = end
    most = _windows.RECORD_TEXT_BYTES
    records = Records(THEIRS, per_key=3)
    far.sendall(records.sealed(descriptor(1, noise(most - 64)) + noise(most - 64)))
    assert take(one) == noise(most - 64)
    far.sendall((most + 1).to_bytes(4, "little"))  # its length alone is refused
    with pytest.raises(CorruptMessageError, match=f"record of {most + 1} bytes"):
        one.poll(5.0)
    assert one.is_lost


@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1])
def test_impossible_lengths(end, length):
    one, far = end
    far.sendall(length.to_bytes(4, "little") + bytes(100))
    with pytest.raises(CorruptMessageError, match=f"record of {length} bytes"):
        one.poll(5.0)


def test_plain_frames_do_not_open(end):
    one, far = end
    far.sendall(descriptor(1, b"text") + b"text")
    with pytest.raises(CorruptMessageError):
        one.poll(5.0)


@pytest.mark.property
@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200_000) | st.sampled_from([65471, 65472, 65473]), max_size=8),
    per_key=st.integers(1, 5),
)
def test_messages_of_any_size_arrive(sizes, per_key):
    near, far = socket.socketpair()
    links = _windows.Link.pair()
    one = endpoint(near, links[0], (OURS, THEIRS), per_key)
    other = endpoint(far, links[1], (THEIRS, OURS), per_key)
    for n, size in enumerate(sizes):
        sender, receiver = (one, other) if n % 3 else (other, one)
        thread = threading.Thread(target=post, args=(sender, noise(size, n)))
        thread.start()  # a socket's buffer may be smaller than a message
        assert take(receiver) == noise(size, n)
        thread.join()
    one.close()
    other.close()


def test_secrets_of_another_size_are_refused():
    near, far = socket.socketpair()
    link = _windows.Link.pair()[0]
    with near, far:
        for secrets in ((b"short", THEIRS), (OURS, b"")):
            with pytest.raises(ValueError, match="32 bytes"):
                _windows.SocketChannel(near.fileno(), 4096, 4096, link, secrets)
            near.sendall(b"still ours")
            assert far.recv(100) == b"still ours"


def test_the_key_exchange_is_that_of_another_implementation():
    ours, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    public = _windows.x25519_public(ours.private_bytes_raw())
    assert public == ours.public_key().public_bytes_raw()
    shared = _windows.x25519_shared(
        ours.private_bytes_raw(), theirs.public_key().public_bytes_raw()
    )
    assert shared == theirs.exchange(X25519PublicKey.from_public_bytes(public))


@pytest.mark.timing
def test_a_peer_that_stops_within_a_record_is_lost(end):
    one, far = end
    far.sendall(Records(THEIRS, per_key=3).sealed(descriptor(1, b"text") + b"text")[:-1])
    with pytest.raises(PeerLostError, match="stopped within a message"):
        one.poll(10.0)
