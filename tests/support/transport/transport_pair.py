"""Fixtures of the suite that every transport passes: a listener, and two connected ends.

TRANSPORT=rdma,rdma-polled in the environment runs it on those alone, where there is a device.
"""

from __future__ import annotations

import os

import pytest

import transport
from tests.support.transport.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES

TRANSPORTS = os.environ.get("TRANSPORT", "inproc,shm,tcp,tcp-encrypted").split(",")


@pytest.fixture(params=TRANSPORTS)
def transport_name(request) -> str:
    return request.param


def url_for(name: str, tmp_path) -> str:
    return {
        "inproc": f"inproc://{tmp_path.name}",
        "shm": f"shm://{tmp_path}/socket",
        "tcp": "tcp://127.0.0.1:0",
        "tcp-encrypted": "tcp://127.0.0.1:0",
        "rdma": "rdma://127.77.0.1:0",
        "rdma-polled": "rdma://127.77.0.1:0?imm=0",
    }[name]


def encryption_of(name: str) -> str:
    return "on" if name == "tcp-encrypted" else "auto"


@pytest.fixture
def listener(transport_name, tmp_path):
    made = transport.listen(
        url_for(transport_name, tmp_path),
        key=KEY,
        info={"we": "serve"},
        window_bytes=WINDOW_BYTES,
        encryption=encryption_of(transport_name),
    )
    yield made
    made.close()


@pytest.fixture
def pair(listener, transport_name):
    """Returns the end that connected and the one that was accepted."""
    one = transport.connect(
        listener.url,
        key=KEY,
        info={"we": "connect"},
        window_bytes=WINDOW_BYTES,
        encryption=encryption_of(transport_name),
    )
    other = listener.accept(PATIENCE_S)
    assert other is not None
    yield one, other
    one.close()
    other.close()
