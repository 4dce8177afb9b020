"""Unusable memory nodes are refused with one line that names the setting, and never the key."""

from __future__ import annotations

import contextlib
import logging
import re
import socket

import pytest
from typer.testing import CliRunner

import transport
from serve import LLM
from serve.cli.main import app
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.nodes.served_nodes import KEY, MIB, key_file, nodes


def run(*arguments):
    model = str(checkpoint("llama"))
    return CliRunner().invoke(app, ["run", model, "--port", "0", *map(str, arguments)])


def assert_refused(result, expected, caplog):
    assert result.exit_code == 2, result.output
    output = re.sub(r"\s*\n[│ ]*", " ", result.output)
    assert re.search(expected, output), output
    assert "Traceback" not in output
    for text in (output, caplog.text):
        assert KEY.decode() not in text and "qwertz" not in text


@pytest.fixture
def all_logs(caplog):
    caplog.set_level(logging.DEBUG)
    return caplog


LONG = ("--max-model-len", "250")
ADDRESSES = [
    ("http://127.0.0.1:9", "memory_nodes: http://127.0.0.1:9: no transport 'http'"),
    ("node:7000", "memory_nodes: node:7000: an address begins with .* tcp://node:7000"),
    ("", "memory_nodes has no address"),
    (" , ", "memory_nodes has no address"),
    ("tcp://127.0.0.1", "memory_nodes: tcp://127.0.0.1"),
    ("tcp://127.0.0.1:99999", "memory_nodes: tcp://127.0.0.1:99999"),
    ("tcp://127.0.0.1:9", "memory_nodes: tcp://127.0.0.1:9: .*refused"),
    ("tcp://:9", "memory_nodes: tcp://:9"),
    ("shm://here/there", "memory_nodes: shm://here/there: an absolute path"),
    ("shm:///nowhere/node", "memory_nodes: shm:///nowhere/node: No such file"),
    ("inproc://nobody", "memory_nodes: inproc://nobody: there is no listener"),
    ("rdma://127.0.0.1:9", "memory_nodes: rdma://127.0.0.1:9: "),
    ("tcp://x:1,tcp://x:1", "memory_nodes has an address twice"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("more", [(), ("--memory-node-bytes", "1M")])
@pytest.mark.parametrize(("url", "expected"), ADDRESSES)
def test_addresses_without_a_node_are_refused(url, expected, more, tmp_path, all_logs):
    result = run("--memory-nodes", url, "--memory-node-key-file", key_file(tmp_path), *more)
    assert_refused(result, expected, all_logs)


def test_tcp_needs_a_key(all_logs):
    expected = "tcp://127.0.0.1:9 needs a memory_node_key_file"
    assert_refused(run("--memory-nodes", "tcp://127.0.0.1:9"), expected, all_logs)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "memory_node_key_file .*: No such file"), (b"qwertz", "has less than 16 bytes")],
    ids=["none", "short"],
)
def test_a_missing_or_short_key_is_refused(content, expected, tmp_path, all_logs):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    result = run("--memory-nodes", "tcp://127.0.0.1:9", "--memory-node-key-file", path)
    assert_refused(result, expected, all_logs)


@pytest.mark.parametrize("more", [(), ("--memory-node-bytes", "1M")])
def test_a_wrong_key_is_refused(more, tmp_path, all_logs):
    path = key_file(tmp_path, b"another key, also long enough")
    with nodes("tcp", 1, tmp_path) as urls:
        result = run("--memory-nodes", urls[0], "--memory-node-key-file", path, *more)
    assert result.exit_code == 2
    assert re.search(r"memory_nodes: tcp://\S+: the peer .*key", result.output)
    for text in (result.output, all_logs.text):
        assert KEY.decode() not in text and "long enough" not in text


@pytest.mark.parametrize(
    ("url", "mode", "expected"),
    [
        ("tcp://127.0.0.1:9", "yes", "memory_node_encryption .*auto, on, off"),
        ("rdma://127.0.0.1:9", "on", "memory_node_encryption on: rdma://127.0.0.1:9 cannot be"),
    ],
)
def test_encryption_that_cannot_be_is_refused(url, mode, expected, tmp_path, all_logs):
    more = ("--memory-node-key-file", str(key_file(tmp_path)), "--memory-node-encryption", mode)
    assert_refused(run("--memory-nodes", url, *more), expected, all_logs)
    assert_refused(CliRunner().invoke(app, ["node", url, *more]), expected, all_logs)


@pytest.mark.parametrize("more", [(), ("--memory-node-bytes", "1M")])
def test_a_node_without_the_encryption_that_is_asked_for_is_refused(more, tmp_path, all_logs):
    key = key_file(tmp_path)
    with nodes("tcp", 1, tmp_path) as urls:
        more = ("--memory-node-key-file", key, "--memory-node-encryption", "on", *more)
        result = run("--memory-nodes", urls[0], *more)
    expected = "encryption is on at the connecting end and off at the listener"
    assert_refused(result, expected, all_logs)


def test_another_listener_is_refused(tmp_path, all_logs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.close()
        listener = transport.listen(url, key=KEY)
        result = run("--memory-nodes", url, "--memory-node-key-file", key_file(tmp_path))
        listener.close()
    assert_refused(result, f"memory_nodes: {url} is not a memory node", all_logs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--memory-node-bytes", "16K", *LONG), "max_model_len .*raise memory_node_bytes"),
        (("--memory-node-bytes", "100", *LONG), "memory_nodes: .*FULL: .* pages are too few"),
        (("--memory-partition", "head"), "memory_partition head needs a K/V head for each of 3"),
        (("--memory-partition", "half"), "memory_partition must be one of"),
        (("--memory-wire", "int4"), "memory_wire must be one of"),
        (("--memory-prefill", "none"), "memory_prefill must be one of"),
        (("--max-model-len", "999999"), "max_model_len 999999 is above the model's"),
        (("--kv-cache-dir", "/tmp/x"), "kv_cache_dir cannot be used with memory_nodes"),
        (("--kv-page-bytes", "8192"), "kv_page_bytes cannot be used with memory_nodes"),
        (("--max-num-batched-tokens", "60000"), "memory_nodes: .*rows take messages of"),
    ],
)
def test_invalid_settings_are_refused(settings, expected, tmp_path, all_logs):
    with nodes("inproc", 3, tmp_path) as urls:
        result = run("--memory-nodes", ",".join(urls), *settings)
        assert_refused(result, expected, all_logs)


def test_a_model_that_does_not_fit_the_partition_or_wire_is_refused(tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        for name, settings, expected in (
            (("qwen2", "window"), {"memory_partition": "sequence"}, "memory_partition sequence"),
            (("llama", "head-dim"), {"memory_wire": "int8"}, "memory_wire int8"),
        ):
            with pytest.raises(ConfigError, match=expected):
                LLM(str(checkpoint(*name)), memory_nodes=urls, **settings)


def test_a_full_node_is_refused(tmp_path):
    """Another engine has all of its memory."""
    with nodes("inproc", 1, tmp_path, capacity_bytes=4 * MIB) as urls:
        model = str(checkpoint("llama"))
        with LLM(model, memory_nodes=urls, max_model_len=128) as llm:
            with pytest.raises(ConfigError, match=r"memory_nodes: .*FULL.* pages are free"):
                LLM(model, memory_nodes=urls, max_model_len=128)
            assert llm.generate("hi", use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("nodes_setting", [3, ["tcp://x:1", 3], {"tcp://x:1": 1}])
def test_invalid_lists_of_addresses_are_refused(nodes_setting):
    with pytest.raises(ConfigError, match="memory_nodes must be a list of addresses"):
        LLM(str(checkpoint("llama")), memory_nodes=nodes_setting)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("http://127.0.0.1:1",), "no transport 'http'"),
        (("tcp://127.0.0.1:99999",), "tcp://127.0.0.1:99999"),
        (("tcp://192.0.2.1:7000",), "Cannot assign requested address"),
        (("shm:///nowhere/at/all",), "shm:///nowhere/at/all: No such file"),
        (("inproc://x",), "inproc://x can only be reached from this process"),
    ],
)
def test_invalid_addresses_of_a_new_node_are_refused(arguments, expected, tmp_path, all_logs):
    options = ("--memory-node-key-file", str(key_file(tmp_path)), "--kv-cache-bytes", "1M")
    assert_refused(CliRunner().invoke(app, ["node", *arguments, *options]), expected, all_logs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--kv-cache-bytes", "64"), "kv_cache_bytes 64 must be from 65536 to"),
        (("--kv-cache-bytes", "900TiB"), "kv_cache_bytes .* bytes of free memory"),
        (("--threads", "0"), "threads must be 1 or more, not 0"),
        (("--max-engines", "0"), "max_engines must be 1 or more, not 0"),
        (("--drain-s", "-1"), "drain_s must be 0 or more seconds, not -1"),
        (("--drain-s", "nan"), "drain_s must be 0 or more seconds, not nan"),
        (("--drain-s", "inf"), "drain_s must be 0 or more seconds, not inf"),
    ],
)
def test_invalid_settings_of_a_node_are_refused(settings, expected, tmp_path, all_logs):
    url = f"shm://{tmp_path}/node"
    assert_refused(CliRunner().invoke(app, ["node", url, *settings]), expected, all_logs)


def test_an_unknown_transport_is_refused_before_a_missing_key(all_logs):
    assert_refused(CliRunner().invoke(app, ["node", "foo://x"]), "no transport 'foo'", all_logs)


def test_an_address_in_use_exits_with_1(tmp_path, all_logs):
    """The exit code is not 2, since a later start may succeed with the same settings."""
    with nodes("tcp", 1, tmp_path) as urls:
        options = ("--memory-node-key-file", str(key_file(tmp_path)), "--kv-cache-bytes", "1M")
        result = CliRunner().invoke(app, ["node", urls[0], *options])
    assert result.exit_code == 1
    assert re.search("Address already in use", result.output)


def test_a_node_on_tcp_needs_a_key(all_logs):
    expected = "tcp://127.0.0.1:0 needs a memory_node_key_file"
    assert_refused(CliRunner().invoke(app, ["node", "tcp://127.0.0.1:0"]), expected, all_logs)


def test_a_readable_key_and_small_nodes_give_warnings(tmp_path, caplog):
    """Other users may read the key, and the node has less memory than memory_node_bytes."""
    path = key_file(tmp_path)
    path.chmod(0o644)
    with nodes("tcp", 1, tmp_path) as urls:
        settings = {"memory_node_key_file": path, "memory_node_bytes": 1 << 40}
        with LLM(str(checkpoint("llama")), memory_nodes=urls, **settings):
            pass
    assert re.search(r"memory_node_key_file \S+ can be read by other users", caplog.text)
    assert re.search(rf"memory_node_bytes {1 << 40}: tcp://\S+ has only \d+\n", caplog.text)
    assert KEY.decode() not in caplog.text
    caplog.clear()
    path.chmod(0o600)
    with (
        nodes("tcp", 1, tmp_path) as urls,
        LLM(str(checkpoint("llama")), memory_nodes=urls, memory_node_key_file=path),
    ):
        pass
    assert "WARNING" not in caplog.text


def test_nodes_of_unequal_size_give_a_warning(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sizes = {"one": 64 * MIB, "two": 8 * MIB}
    with contextlib.ExitStack() as stack:
        urls = []
        for name, size in sizes.items():
            folder = tmp_path / name
            folder.mkdir()
            urls += stack.enter_context(nodes("shm", 1, folder, capacity_bytes=size))
        with LLM(str(checkpoint("llama")), memory_nodes=urls, memory_partition="head"):
            assert "smallest memory node has 8 MiB, the largest 64; the head" in caplog.text
            assert re.search(r"K/V in \w+, \d[\d.]* MiB on shm://", caplog.text)
        caplog.clear()
        with LLM(str(checkpoint("llama")), memory_nodes=urls, memory_partition="request"):
            assert "smallest" not in caplog.text


def test_an_engine_gets_pages_in_proportion_to_its_memory(tmp_path):
    """An engine with half of a large node has half of its pages, as each may become a mapping."""
    with nodes("shm", 1, tmp_path, capacity_bytes=30_000 * MIB // 4) as urls:
        for num_bytes, few, many in ((16 * MIB, 190, 4000), (3000 * MIB, 11_000, 15_000)):
            settings = {"memory_nodes": urls, "memory_node_bytes": num_bytes}
            with LLM(str(checkpoint("llama")), **settings) as llm:
                assert few <= llm.stats().pages_total <= many
