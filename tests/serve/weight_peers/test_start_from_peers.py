"""An engine starts from the memory of another one: the same tokens, and no weight file is read."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
import weakref
from functools import partial
from pathlib import Path

import pytest

from ops.cpu import native_library
from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError, ModelLoadError
from serve.loading import model_source
from serve.loading.model_source import wait_for_packed_weights
from serve.models.checkpoint import Checkpoint, TensorEntry
from serve.models.packed_cache.cache import PackedCache
from serve.models.told_checkpoint import pack_table, read_table
from serve.weight_peers import peers, pull, server
from serve.weight_peers.peers import rank_url
from tests.support.models.packed_models import copy_of_model, forbid_fetching
from tests.support.models.weight_engines import KINDS, engine, start, tokens, without_weights

pytestmark = [
    pytest.mark.usefixtures("one_thread", "nothing_is_told"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]


@pytest.mark.parametrize(("family", "variant", "dtype"), KINDS)
def test_tokens_are_the_same_without_weight_files(
    family: str,
    variant: str,
    dtype: str,
    tmp_path: Path,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = copy_of_model(family, variant, tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"
    with engine(path, key_file, weights_listen=url, dtype=dtype) as first:
        expected = tokens(first)
        forbid_fetching(monkeypatch)
        with engine(bare, key_file, weights_from=[url], dtype=dtype) as second:
            assert tokens(second) == expected


def test_weights_that_were_pulled_are_served(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare = without_weights(path, tmp_path)
    urls = [f"inproc://{tmp_path}/{number}" for number in range(2)]
    with contextlib.ExitStack() as second_of:
        with engine(path, key_file, weights_listen=urls[0]) as first:
            expected = tokens(first)
            second = second_of.enter_context(
                engine(bare, key_file, weights_from=urls[:1], weights_listen=urls[1])
            )
        with engine(bare, key_file, weights_from=urls) as third:
            assert tokens(second) == tokens(third) == expected


def test_weights_of_a_file_are_served(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"
    monkeypatch.setattr(model_source, "PackedCache", partial(PackedCache, min_bytes=0))
    cache = {"packed_cache": tmp_path / "cache"}
    with engine(path, key_file, **cache) as first:
        expected = tokens(first)
        wait_for_packed_weights()
    forbid_fetching(monkeypatch)
    with (
        engine(path, key_file, weights_listen=url, **cache),
        engine(bare, key_file, weights_from=[url]) as second,
    ):
        assert tokens(second) == expected


def test_ranks_pull_their_parts_only(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"shm://{tmp_path}/w"
    group = {"tensor_parallel_size": 2, "compute_threads": 1}
    with engine(path, key_file, weights_listen=url, **group) as first:
        expected = tokens(first)
        with engine(bare, key_file, weights_from=[url], **group) as second:
            assert tokens(second) == expected
            sharded = second._loaded.weight_peers.pulled.num_bytes
        with pytest.raises(MergestepError, match=r"packing .*0 of 2.* there"):
            start(bare, key_file, weights_from=[url])
    with engine(path, key_file, weights_listen=f"inproc://{tmp_path}") as whole:
        start(bare, key_file, weights_from=[f"inproc://{tmp_path}"])
        assert sharded < 0.8 * whole._loaded.weight_peers.stats().served_bytes


# -- peers that do not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "precision int8 64 there, plain 64 here"),
        ({"dtype": "int4"}, "precision int8 64 there, int4 64 here"),
    ],
)
def test_other_settings_need_other_weights(
    settings: dict[str, object], message: str, tmp_path: Path, key_file: Path
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"
    with engine(path, key_file, weights_listen=url):
        with pytest.raises(ModelLoadError, match=message):
            start(bare, key_file, weights_from=[url], **settings)
        with engine(path, key_file, **settings) as alone:
            expected = tokens(alone)
        with engine(path, key_file, weights_from=[url], **settings) as loaded:
            assert tokens(loaded) == expected, "from the checkpoint"


def test_a_peer_with_other_weights_is_not_used(tmp_path: Path, key_file: Path) -> None:
    """Its config.json is the same."""
    path = copy_of_model("llama", "base", tmp_path)
    other = Path(shutil.copytree(path, tmp_path / "other"))
    (file,) = other.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-40:] = content[-80:-40]
    file.write_bytes(content)
    url = f"inproc://{tmp_path}"
    with engine(path, key_file) as alone:
        expected = tokens(alone)
    with (
        engine(other, key_file, weights_listen=url) as first,
        engine(path, key_file, weights_from=[url]) as second,
    ):
        assert tokens(second) == expected
        assert first._loaded.weight_peers.stats().served_bytes == 0


def test_a_peer_with_another_model_tells_nothing(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    other = copy_of_model("qwen3_moe", "head-24", tmp_path / "other")
    bare, urls = without_weights(path, tmp_path), [f"inproc://{tmp_path}/{n}" for n in range(2)]
    with engine(other, key_file, weights_listen=urls[0]):
        with engine(path, key_file, weights_listen=urls[1]) as first:
            expected = tokens(first)
            with engine(bare, key_file, weights_from=urls) as second:
                assert tokens(second) == expected
        with pytest.raises(ModelLoadError, match=r"/0: config \w+ there, \w+ here"):
            start(bare, key_file, weights_from=urls[:1])


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("huge_pages", OSError(12, "no memory is left"), "no memory is left"),
        ("huge_pages", MemoryError(), "MemoryError"),
        ("available_memory", 1 << 20, "1 MiB of memory are free"),
    ],
)
def test_weights_without_room_come_from_files(
    name: str,
    error: object,
    message: str,
    tmp_path: Path,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"

    def changed(*_: object) -> object:
        if isinstance(error, BaseException):
            raise error
        return error

    with engine(path, key_file, weights_listen=url) as first:
        expected = tokens(first)
        monkeypatch.setattr(pull if name == "huge_pages" else peers, name, changed)
        with engine(path, key_file, weights_from=[url]) as second:
            assert tokens(second) == expected
        assert message in caplog.text and "they are loaded from files" in caplog.text
        with pytest.raises(ModelLoadError, match=message):
            start(bare, key_file, weights_from=[url])


def test_a_connection_that_waited_too_long_is_made_again(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    begin = peers.WeightPeers.pull

    def late(self: peers.WeightPeers, identity: dict[str, str]) -> object:
        if self._links:
            time.sleep(1.0)
        return begin(self, identity)

    with engine(path, key_file, weights_listen=url) as first:
        expected = tokens(first)
        monkeypatch.setattr(peers.WeightPeers, "pull", late)
        with engine(bare, key_file, weights_from=[url]) as second:
            assert tokens(second) == expected


def test_what_cannot_be_kept_needs_the_files(tmp_path: Path, key_file: Path) -> None:
    path = copy_of_model("llama", "gptq-order", tmp_path)
    bare, url = without_weights(path, tmp_path), f"inproc://{tmp_path}"
    with engine(path, key_file, weights_listen=url) as first:
        expected = tokens(first)
        with engine(path, key_file, weights_from=[url]) as second:
            assert tokens(second) == expected
        with pytest.raises(ModelLoadError, match="no weight files"):
            start(bare, key_file, weights_from=[url])


def test_without_peers_the_files_are_loaded_or_the_start_fails(
    tmp_path: Path, key_file: Path
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    bare = without_weights(path, tmp_path)
    nobody = ["tcp://127.0.0.1:9"]
    with engine(path, key_file) as alone, engine(path, key_file, weights_from=nobody) as second:
        assert tokens(second) == tokens(alone)
    with pytest.raises(ModelLoadError, match="no weight files, and no peer of weights_from"):
        start(bare, key_file, weights_from=nobody)


def test_an_engine_that_is_closed_serves_nothing_and_keeps_nothing(
    tmp_path: Path, key_file: Path
) -> None:
    path, url = copy_of_model("llama", "base", tmp_path), f"inproc://{tmp_path}"
    with engine(path, key_file, weights_listen=url) as llm:
        held = llm._loaded.weight_peers
        weights = weakref.ref(held._offered[1].packed)
    gc.collect()
    assert held.url is None and weights() is None
    start(path, key_file, weights_listen=url)  # the address is free again


# -- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights_from": ["h:1"]}, "weights_from must be an address"),
        ({"weights_from": ["tcp://h:1", "tcp://h:1"]}, "weights_from has an address twice"),
        ({"weights_listen": "here"}, "weights_listen must be an address"),
        ({"weights_listen": "inproc://x", "load_format": "random"}, "load_format random cannot"),
        ({"weights_from": ["inproc://x"], "converter": True}, "converter cannot be used with"),
        ({"weights_key_file": 3}, "weights_key_file must be a path"),
        ({"weights_rate_bytes": 0}, "weights_rate_bytes must be a positive integer"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights_from": ["inproc://x"], "weights_key_file": None}, "needs a weights_key_file"),
        ({"weights_listen": "inproc://x", "weights_rate_bytes": 1}, "weights_rate_bytes 1 must be"),
        ({"weights_listen": "ftp://x:1"}, "weights_listen: ftp://x:1: no transport"),
        ({"weights_listen": "tcp://192.0.2.1:7001"}, "weights_listen: tcp://192.0.2.1:7001"),
        ({"weights_listen": "inproc://x", "weights_key_file": "/dev/null"}, "weights_key_file"),
    ],
)
def test_settings_that_are_wrong_when_they_are_used(
    settings: dict[str, object], message: str, tmp_path: Path, key_file: Path
) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    with pytest.raises(ConfigError, match=message):
        start(path, key_file, **settings)


def test_each_rank_has_an_address() -> None:
    assert rank_url("tcp://[::1]:7000", 0) == "tcp://[::1]:7000"
    assert rank_url("tcp://[::1]:7000", 3) == "tcp://[::1]:7003"
    assert rank_url("shm:///run/w", 2) == "shm:///run/w.2"
    for url in ("tcp://h:0", "tcp://h", "tcp://h:65535"):
        with pytest.raises(ConfigError, match="no port for rank 1"):
            rank_url(url, 1)


# -- a checkpoint's table


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint(copy_of_model("llama", "base", tmp_path))
    assert read_table(checkpoint.path, pack_table(checkpoint)) == checkpoint.entries


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b"[1]",
        b'{"a": 1}',
        b'{"a": ["f", [1], "F32", 0]}',
        b'{"a": ["../f", [1], "F32", 0, 4]}',
        b'{"a": ["f", [-1], "F32", 0, 4]}',
        b'{"a": ["f", [1.5], "F32", 0, 4]}',
        b'{"a": ["f", [1,1,1,1,1,1,1,1,1], "F32", 0, 4]}',
        b'{"a": ["f", [1], 3, 0, 4]}',
        b'{"a\\n": ["f", [1], "F32", 0, 4]}',
    ],
)
def test_wrong_tables_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor|JSON|Expecting|unpack"):
        read_table(tmp_path, content)


def test_entries_are_of_the_directory(tmp_path: Path) -> None:
    content = b'{"a": ["f", [2], "F32", 8, 16]}'
    assert read_table(tmp_path, content) == {"a": TensorEntry(tmp_path / "f", (2,), "F32", 8, 16)}
