"""What `serve cluster` hands to ranks, and its errors without a cluster."""

from __future__ import annotations

import os
import re
import socket
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from serve.cli.cluster import content
from serve.cli.main import app
from serve.cli.run_settings import SETTINGS, RunSettings, Value
from serve.cluster.rank_process import RankProcess, RankSpec, _environment, ready_url
from serve.cluster.ray_cluster import connect
from serve.errors import ConfigError, MergestepError

KEY = "0123456789abcdef"


def settings_with(**given: object) -> RunSettings:
    values = {name: Value(setting.default) for name, setting in SETTINGS.items()}
    return RunSettings(values | {name: Value(each, "flag") for name, each in given.items()})


def spec_of(settings: str, rank: int = 1) -> RankSpec:
    return RankSpec(1, rank, 2, "tcp://10.0.0.1:7000", settings, KEY, {"MERGESTEP_API_KEY": "s"})


def shown(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cluster", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_settings_that_were_given_travel_as_toml():
    given = settings_with(
        model='./a "b"', kv_cache_bytes=1 << 30, api_keys=("x", "y"), group_key_file="key"
    )
    made = content(given, KEY, 4)
    assert tomllib.loads(made.settings) == {
        "compute_threads": 4,
        "model": './a "b"',
        "kv_cache_bytes": 1 << 30,
        "quiet": True,
    }
    assert list(made.secrets.values()) == ["x,y"]
    assert tomllib.loads(content(settings_with(compute_threads=2), KEY, 4).settings) == {
        "compute_threads": 2,
        "quiet": True,
    }


def test_a_rank_gets_its_machines_environment_and_its_own_place():
    there = {"PATH": "/bin", "MERGESTEP_PORT": "1", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "3"}
    assert _environment(there, spec_of(""), "/key") == {
        "PATH": "/bin",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MERGESTEP_GROUP_URL": "tcp://10.0.0.1:7000",
        "MERGESTEP_GROUP_KEY_FILE": "/key",
        "MERGESTEP_API_KEY": "s",
    }


def test_the_line_of_a_ready_server_is_found():
    assert ready_url("model is ready at http://0.0.0.0:80/v1") == "http://0.0.0.0:80"
    assert ready_url("m is ready at https://[::1]:80/v1") == "https://[::1]:80"
    for line in ("", "is ready", "rank 1 is ready at noon", " is ready at http://a/v1"):
        assert ready_url(line) == "", line


@pytest.mark.process
def test_a_process_reads_its_settings_and_tells_its_last_words():
    process = RankProcess(spec_of("max_num_seqs = -1\n"))
    process._reader.join(60.0)
    process._process.wait(60.0)
    assert process.status() == 2
    assert any(re.search("max_num_seqs must", line) for line in process.take_lines())
    assert process.take_lines() == []
    process.kill()


def test_ray_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'mergestep\[ray\]'"):
        connect("auto")
    assert shown("--dry-run")[0] == 2


@pytest.mark.parametrize("address", ["nowhere", "ray://10.0.0.1:10001", ":1", "host:port"])
def test_an_address_that_is_none(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", os)  # is not reached
    with pytest.raises(ConfigError, match="must be auto, local or HOST:PORT"):
        connect(address)


def test_a_cluster_that_does_not_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", os)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(MergestepError, match=f"ray_address 127.0.0.1:{port} cannot be reached"):
        connect(f"127.0.0.1:{port}")


def test_settings_are_checked_before_a_cluster_is_asked():
    assert shown("--max-num-seqs=-1")[0] == 2
    assert shown("--group-url=tcp://10.0.0.1:7000")[0] == 2
    assert shown("--cpus-per-rank=0")[0] == 2
    assert shown("--backend=cuda")[0] == 2
