"""Encrypted tcp: what a machine in between sees and can do, and which settings go together."""

from __future__ import annotations

import gc
import json
import os
import socket

import pytest

import transport
from tests.support.transport.record_proxy import proxy_to
from tests.support.transport.transport_peer import authenticated
from tests.support.transport.transport_rig import (
    KEY,
    PATIENCE_S,
    WINDOW_BYTES,
    noise,
    post,
    take,
    wait_until,
)
from transport import encryption
from transport.base import CorruptMessageError, PeerLostError, RefusedError, TransportError
from transport.control import Session, exchange_hellos, hello
from transport.encryption import KeyExchange, is_loopback

SECRET = b"what nobody in between may read!"


@pytest.fixture
def listener():
    made = transport.listen(
        "tcp://127.0.0.1:0", key=KEY, window_bytes=WINDOW_BYTES, encryption="on"
    )
    yield made
    made.close()


@pytest.fixture
def proxy(listener):
    with proxy_to(listener.url) as made:
        yield made


def connected(url: str, key: bytes = KEY, mode: str = "on"):
    return transport.connect(url, key=key, window_bytes=WINDOW_BYTES, encryption=mode)


@pytest.fixture
def pair(listener, proxy):
    one = connected(proxy.url)
    other = listener.accept(PATIENCE_S)
    yield one, other
    one.close()
    other.close()


def test_an_end_that_cannot_be_made_closes_its_connections(listener, monkeypatch):
    connected(listener.url).close()  # the heartbeat thread has a descriptor of its own
    listener.accept(PATIENCE_S).close()
    secrets = KeyExchange.secrets

    def short(*args, is_client):
        found = secrets(*args, is_client=is_client)
        return (b"short", b"short") if is_client else found

    monkeypatch.setattr(KeyExchange, "secrets", short)
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="32 bytes"):
        connected(listener.url)
    gc.collect()  # the traceback
    other = listener.accept(PATIENCE_S)
    wait_until(lambda: other.is_lost)
    other.close()
    # the other end, which is still referenced, has one descriptor
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_fds + 1)


# ---- on the wire


def test_nothing_of_a_message_is_on_the_wire(pair, proxy):
    one, other = pair
    post(one, SECRET * 1000)
    assert take(other) == SECRET * 1000
    assert len(proxy.sent_to_listener) > 32000
    pieces = {proxy.sent_to_listener[i : i + 8] for i in range(len(proxy.sent_to_listener) - 8)}
    assert not any((SECRET * 2)[i : i + 8] in pieces for i in range(len(SECRET)))


def test_equal_messages_look_different(pair, proxy):
    one, other = pair
    sent = []
    for _ in range(3):
        post(one, SECRET)
        assert take(other) == SECRET
        sent.append(proxy.sent_to_listener[sum(map(len, sent)) :])
    assert len({len(record) for record in sent}) == 1
    assert len({record[4:20] for record in sent}) == 3


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


@pytest.mark.parametrize("at", [0, 4, 40, 70, -16, -1])
def test_an_altered_byte_ends_the_connection(pair, proxy, at):
    """In the length, the descriptor, the payload and the tag."""
    one, other = pair
    post(one, noise(300))
    assert take(other) == noise(300)
    proxy.change_record = lambda record: flipped(record, at % len(record)) + bytes(1)
    post(one, noise(300))
    assert_ends(one, other, CorruptMessageError)


def assert_ends(one, other, error: type[TransportError]) -> None:
    with pytest.raises(error):
        other.poll(PATIENCE_S)
    assert other.is_lost
    wait_until(lambda: one.is_lost)
    with pytest.raises(PeerLostError):
        post(one, b"more")


def test_a_repeated_record_ends_the_connection(pair, proxy):
    one, other = pair
    proxy.change_record = lambda record: record * 2
    post(one, SECRET)
    assert take(other) == SECRET
    assert_ends(one, other, CorruptMessageError)


def test_an_old_record_ends_the_connection(pair, proxy):
    one, other = pair
    post(one, SECRET)
    assert take(other) == SECRET
    old = proxy.sent_to_listener
    proxy.change_record = lambda record: old
    post(one, b"something else")
    assert_ends(one, other, CorruptMessageError)


@pytest.mark.parametrize("are_swapped", [True, False])
def test_records_left_out_or_in_another_order_end_the_connection(pair, proxy, are_swapped):
    one, other = pair
    held: list[bytes] = []

    def change(record: bytes) -> bytes:
        held.append(record)
        return b"" if len(held) == 1 else record + held[0] * are_swapped

    proxy.change_record = change
    post(one, b"first")
    post(one, b"second")
    assert_ends(one, other, CorruptMessageError)


def test_a_record_cut_at_the_end_of_the_stream(pair, proxy):
    one, other = pair

    def cut(record: bytes) -> bytes | None:
        if len(proxy.sent_to_listener) > len(record):
            return None
        return record[:-1]

    proxy.change_record = cut
    post(one, b"first")
    post(one, b"second")
    assert_ends(one, other, PeerLostError)


def test_a_record_cut_within_the_stream(pair, proxy):
    one, other = pair
    proxy.change_record = lambda record: record[:-1]
    post(one, b"first")
    post(one, b"second")
    assert_ends(one, other, CorruptMessageError)


def test_an_end_does_not_take_its_own_records(pair, proxy):
    """Each direction has its own secret: a record that is sent back does not open."""
    one, other = pair
    post(other, SECRET)
    assert take(one) == SECRET
    reflected = proxy.records_to_client[-1]
    proxy.change_record = lambda record: reflected
    post(one, SECRET)
    assert_ends(one, other, CorruptMessageError)


# ---- agreeing on it


@pytest.mark.parametrize("ours", ["on", "off"])
def test_ends_with_different_settings_refuse_each_other(ours):
    theirs = "off" if ours == "on" else "on"
    listener = transport.listen("tcp://127.0.0.1:0", key=KEY, encryption=theirs)
    on, off = ("the connecting end", "the listener")[:: 1 if ours == "on" else -1]
    with pytest.raises(RefusedError, match=f"encryption is on at {on} and off at {off}: both"):
        connected(listener.url, mode=ours)
    wait_until(lambda: listener.num_refused == 1)
    assert listener.accept(0.0) is None
    listener.close()


def test_a_peer_that_knows_of_no_encryption_is_refused(listener):
    session = authenticated(listener.url)
    with session.sock, pytest.raises(RefusedError, match="off at the connecting end"):
        exchange_hellos(session, hello("tcp", {}, WINDOW_BYTES))
    assert listener.accept(0.0) is None


def without_encryption(hello: bytes) -> bytes:
    said = json.loads(hello)
    del said["encryption"]
    return json.dumps(said).encode()


def with_another_key(hello: bytes) -> bytes:
    return json.dumps(json.loads(hello) | KeyExchange().hello()).encode()


@pytest.mark.parametrize("change", [without_encryption, with_another_key])
def test_nobody_in_between_can_change_what_is_agreed(listener, proxy, change):
    proxy.change_control = change
    with pytest.raises(TransportError):
        connected(proxy.url)
    wait_until(lambda: listener.num_refused >= 1)
    assert listener.accept(0.0) is None


def test_another_key_is_refused(listener):
    with pytest.raises(RefusedError, match="another key"):
        connected(listener.url, key=b"some other key of enough bytes")


def test_a_public_key_that_is_none_is_refused():
    with socket.socket() as sock:
        session = Session(sock, KEY, 0.0, is_client=True)
        for bad in ("", "00" * 32, "11" * 31, 7, "no hexadecimal"):
            with pytest.raises(RefusedError, match="public key"):
                KeyExchange().secrets(session, {"encryption": bad}, is_client=True)


def test_the_secrets_need_the_exchange_and_not_the_shared_key_alone():
    """Whoever learns the shared key later knows the session's key and its set-up messages."""
    near, far = socket.socketpair()
    session, peers = (Session(s, KEY, 1e9, is_client=s is near) for s in (near, far))
    one, other = KeyExchange(), KeyExchange()
    for said in (one.hello(), other.hello()):
        session.send(said)
        assert peers.receive() == said
    ours = one.secrets(session, other.hello(), is_client=True)
    assert ours == other.secrets(peers, one.hello(), is_client=False)[::-1]
    assert len(set(ours)) == 2
    assert not {*KeyExchange().secrets(session, other.hello(), is_client=True)} & {*ours}
    near.close()
    far.close()


def test_without_a_setting_only_loopback_is_plain(monkeypatch):
    for is_local in (True, False):
        monkeypatch.setattr(encryption, "is_loopback", lambda host, is_local=is_local: is_local)
        listener = transport.listen("tcp://127.0.0.1:0", key=KEY, window_bytes=WINDOW_BYTES)
        one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
        one.close()
        mode = "off" if is_local else "on"
        connected(listener.url, mode=mode).close()
        with pytest.raises(RefusedError, match="both need the same setting"):
            connected(listener.url, mode="on" if is_local else "off")
        listener.close()


def test_which_addresses_are_of_the_loopback_interface():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    others = ("0.0.0.0", "::", "10.0.0.2", "192.168.1.1", "fe80::1%eth0", "::ffff:10.0.0.2")
    assert not any(map(is_loopback, others))


def test_settings_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="encryption 'yes': it is one of auto, on, off"):
        transport.listen("tcp://127.0.0.1:0", key=KEY, encryption="yes")
    with pytest.raises(ValueError, match="rdma has none"):
        transport.connect("rdma://127.0.0.1:1", key=KEY, encryption="on")
    transport.listen(f"shm://{tmp_path}/s", key=KEY, encryption="on").close()


def test_a_listener_beyond_this_machine_needs_the_library(monkeypatch):
    def missing(private_key: bytes) -> bytes:
        raise TransportError("encryption needs OpenSSL's libcrypto")

    monkeypatch.setattr(encryption, "x25519_public", missing)
    for url, mode in (("tcp://0.0.0.0:0", "auto"), ("tcp://127.0.0.1:0", "on")):
        with pytest.raises(TransportError, match="libcrypto"):
            transport.listen(url, key=KEY, encryption=mode)
    transport.listen("tcp://127.0.0.1:0", key=KEY).close()
