"""The ids of engines in kv_peers, which a server tells hops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serve.loading.kv_peers import _noting_ids
from transport.base import TransportError


def test_ids_are_noted_of_the_settings_addresses_only() -> None:
    """A client that names addresses must not make the table grow."""
    infos: dict[str, dict[str, Any]] = {
        "tcp://a:1": {"engine": "one"},
        "tcp://b:1": {"engine": "x" * 10_000},
        "tcp://c:1": {},
        "tcp://named:1": {"engine": "two"},
    }

    def connect(url: str) -> Any:
        if url not in infos:
            raise TransportError("not there")
        return SimpleNamespace(peer=SimpleNamespace(info=infos[url]))

    found: dict[str, str] = {}
    noting = _noting_ids(connect, ["tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://d:1"], found)
    for url, info in infos.items():
        assert noting(url).peer.info is info
    with pytest.raises(TransportError):
        noting("tcp://d:1")
    assert found == {"tcp://a:1": "one", "tcp://b:1": "x" * 64, "tcp://c:1": ""}
    infos["tcp://a:1"] = {"engine": "started again"}
    noting("tcp://a:1")
    assert found["tcp://a:1"] == "started again"
