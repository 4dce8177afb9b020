"""Engines on one machine compute with the same memory of weights."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest

from ops.cpu import native_library
from serve import LLM
from serve.errors import ConfigError, ModelLoadError
from serve.loading import footprint, model_source
from serve.loading.model_source import wait_for_packed_weights
from serve.models.packed_cache import region
from serve.models.packed_cache import shared_memory as memories
from serve.models.packed_cache.cache import PackedCache
from serve.models.packed_cache.layout import DATA_START
from serve.models.packed_cache.region import huge_bytes
from serve.models.packed_cache.shared_memory import try_arena
from serve.models.packed_cache.sources import NotedTensors
from serve.weight_peers import same_memory
from tests.support.models.packed_models import copy_of_model, forbid_fetching
from tests.support.models.weight_engines import KINDS, engine, start, tokens, without_weights

pytestmark = [
    pytest.mark.usefixtures("one_thread", "nothing_is_told"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(
        native_library.is_available() and try_arena(DATA_START + 1) is None,
        reason="the system has no huge pages of a memfd",
    ),
]


def is_shared(llm: LLM) -> bool:
    """Whether all its weights are in the memory of a peer."""
    pulled = llm._loaded.weight_peers.pulled
    assert pulled.num_shared in (0, pulled.num_bytes)
    return pulled.num_shared > 0


@pytest.mark.parametrize(("family", "variant", "dtype"), KINDS)
def test_tokens_are_those_of_an_engine_alone(
    family: str,
    variant: str,
    dtype: str,
    tmp_path: Path,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = copy_of_model(family, variant, tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    with engine(path, key_file, dtype=dtype) as alone:
        expected = tokens(alone)
    with engine(path, key_file, weights_listen=url, dtype=dtype) as first:
        assert tokens(first) == expected
        forbid_fetching(monkeypatch)
        with engine(bare, key_file, weights_from=[url], dtype=dtype) as second:
            assert is_shared(second)
            assert tokens(second) == expected


def test_the_memory_goes_from_replica_to_replica(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare = without_weights(path, tmp_path)
    urls = [f"{scheme}://{tmp_path}/{i}" for i, scheme in enumerate(("inproc", "shm", "shm"))]
    with contextlib.ExitStack() as others:
        with engine(path, key_file, weights_listen=urls[0]) as first:
            expected = tokens(first)
            copied, shared = (
                others.enter_context(
                    engine(bare, key_file, weights_from=[urls[i]], weights_listen=urls[i + 1])
                )
                for i in range(2)
            )
            assert not is_shared(copied) and is_shared(shared)
        with engine(bare, key_file, weights_from=[urls[2]]) as last:
            assert is_shared(last)
            offered = [each._loaded.weight_peers._offered[1] for each in (copied, shared)]
            assert os.path.sameopenfile(*(each.packed.shared.fileno() for each in offered))
            assert tokens(copied) == tokens(shared) == tokens(last) == expected


def test_a_mapped_file_is_shared(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    monkeypatch.setattr(model_source, "PackedCache", partial(PackedCache, min_bytes=0))
    cache = {"packed_cache": tmp_path / "cache"}
    start(path, key_file, **cache)
    wait_for_packed_weights()
    forbid_fetching(monkeypatch)
    # so small a file has no huge page anywhere
    monkeypatch.setattr(region._Mapping, "is_huge", lambda *_: True)
    with engine(path, key_file, weights_listen=url, **cache) as first:
        expected = tokens(first)
        with engine(bare, key_file, weights_from=[url]) as second:
            assert not is_shared(second) and tokens(second) == expected
        monkeypatch.setattr(memories, "is_on_huge_pages", lambda *_: True)
        monkeypatch.setattr(same_memory, "is_on_huge_pages", lambda *_: True)
        with engine(bare, key_file, weights_from=[url]) as second:
            assert is_shared(second) and tokens(second) == expected


def test_the_weights_of_a_peer_that_has_gone_stay(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    with contextlib.ExitStack() as second_of:
        with engine(path, key_file, weights_listen=url) as first:
            expected = tokens(first)
            second = second_of.enter_context(engine(bare, key_file, weights_from=[url]))
            data = weakref.ref(first._loaded.weight_peers._offered[1].packed.shared)
        del first
        gc.collect()
        assert data() is None
        assert tokens(second) == expected


def test_memory_that_is_damaged_is_not_used(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    url = f"shm://{tmp_path}/w"
    with engine(path, key_file, weights_listen=url) as first:
        expected = tokens(first)
        weights = first._loaded.weight_peers._offered[1].packed
        # the descriptor is of other bytes than those that the peer computes with
        other = try_arena(weights.data_end)
        other.grow(weights.data_end)
        other = other.seal()
        os.dup2(other.fileno(), weights.shared.fileno())
        with engine(path, key_file, weights_from=[url]) as second:
            assert not is_shared(second)
            assert second._loaded.weight_peers.pulled.num_bytes > 0  # it was copied
            assert tokens(second) == expected


def test_without_huge_pages_weights_are_copied(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    monkeypatch.setattr(memories, "_COLLAPSE", 9999)
    with engine(path, key_file, weights_listen=url) as first:
        assert first._loaded.weight_peers._offered[1].packed.shared is None
        expected = tokens(first)
        with engine(bare, key_file, weights_from=[url]) as second:
            assert not is_shared(second) and tokens(second) == expected


def test_weights_are_on_huge_pages_of_their_own_mapping(tmp_path: Path, key_file: Path) -> None:
    path, url = copy_of_model("llama", "base", tmp_path), f"shm://{tmp_path}/w"
    with engine(path, key_file, weights_listen=url) as first:
        tokens(first)
        shared = first._loaded.weight_peers._offered[1].packed.shared
        assert huge_bytes(shared.data.data_ptr()) >= len(shared.data) - DATA_START


@pytest.mark.parametrize("scheme", ["tcp", "inproc"])
def test_shared_memory_is_given_on_over_another_transport(
    scheme: str, tmp_path: Path, key_file: Path
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"inproc://{tmp_path}/x"
    with contextlib.ExitStack() as all_three:
        first = all_three.enter_context(engine(path, key_file, weights_listen=url))
        settings = {"weights_from": [url], "weights_listen": address}
        second = all_three.enter_context(engine(bare, key_file, **settings))
        assert is_shared(second)
        urls = [second._loaded.weight_peers.url]
        third = all_three.enter_context(engine(bare, key_file, weights_from=urls))
        assert not is_shared(third)
        assert tokens(third) == tokens(first)


def test_memory_for_weights_is_needed_only_where_they_are_not_shared(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, url = copy_of_model("llama", "base", tmp_path), f"shm://{tmp_path}/w"
    with engine(path, key_file, weights_listen=url) as first:
        expected = tokens(first)
        monkeypatch.setattr(footprint, "available_memory", lambda: 1000)
        with engine(path, key_file, weights_from=[url]) as second:
            assert is_shared(second) and tokens(second) == expected
    with pytest.raises(ConfigError, match="the weights take"):  # the peer has gone
        start(path, key_file, weights_from=[url])


def test_loading_that_fails_makes_no_more_memory(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, url = copy_of_model("llama", "base", tmp_path), f"shm://{tmp_path}/w"
    began: list[str] = []

    def fail(*_: object, **__: object) -> None:
        began.extend(each.name for each in threading.enumerate())
        raise ModelLoadError("this layer is not there")

    monkeypatch.setattr(NotedTensors, "product", fail)
    with pytest.raises(ModelLoadError, match="is not there"):
        start(path, key_file, weights_listen=url)
    assert "mergestep-weights-memory" in began
    assert "mergestep-weights-memory" not in [each.name for each in threading.enumerate()]
