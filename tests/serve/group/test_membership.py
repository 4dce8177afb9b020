"""Environment variables say which rank a process is, and where the engine is."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.group.membership import Membership, read_group_key, read_membership

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
LWS = {"LWS_WORKER_INDEX": "3", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "lead.svc"}


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **settings})  # type: ignore[arg-type]


def test_without_variables_there_is_no_membership():
    assert read_membership(config(), {}) is None
    assert read_membership(config(), {"RANK": "1", "MASTER_ADDR": "x"}) is None
    assert read_membership(config(), {"LWS_GROUP_SIZE": "7"}) is None


def test_torchrun():
    more = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    expected = Membership(2, 4, "tcp://10.0.0.1:5001", 0, 2)
    assert read_membership(config(), TORCHRUN | more) == expected
    assert read_membership(config(), TORCHRUN) == expected._replace(local_size=1)
    assert expected.engine_url == "tcp://0.0.0.0:5001" and not expected.is_local


def test_a_leader_worker_set():
    assert read_membership(config(), LWS) == Membership(3, 4, "tcp://lead.svc:29501", 0, 1)


def test_group_url_comes_first():
    found = read_membership(config(group_url="tcp://[::1]:7"), TORCHRUN)
    assert found is not None and found.url == "tcp://[::1]:7"
    assert found.is_local and found.engine_url == found.url
    assert found.own_url == "tcp://[::1]:0"


def test_one_rank_is_no_group():
    one = config(tensor_parallel_size=1, pipeline_parallel_size=1)
    assert read_membership(one, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"WORLD_SIZE": "3"}, r"WORLD_SIZE 3 is not .*pipeline_parallel_size, 2 \* 2"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be a whole number from 1 on, not 'x'"),
        ({"RANK": "4"}, "RANK 4 is not below WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK must be a whole number from 0 on, not '-1'"),
        ({"RANK": ""}, "RANK must be a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, nor is group_url"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT 65535 leaves no next port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be"),
        ({"MASTER_ADDR": "a/b"}, "group_url tcp://a/b:5001"),
    ],
)
def test_variables_that_contradict(change, expected):
    with pytest.raises(ConfigError, match=expected):
        read_membership(config(), TORCHRUN | change)


@pytest.mark.parametrize("url", ["shm:///x", "tcp://host", "10.0.0.1:3", "tcp://host:70000"])
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="group_url"):
        read_membership(config(group_url=url), TORCHRUN)


def test_the_address_of_a_rank_is_the_one_that_reaches_the_engine():
    assert Membership(1, 2, "tcp://127.0.0.1:9", 0, 1).own_url == "tcp://127.0.0.1:0"
    assert Membership(1, 2, "tcp://localhost:9", 0, 1).own_url == "tcp://localhost:0"


# ---- the key


def test_beyond_this_machine_a_key_is_needed(tmp_path):
    member = Membership(1, 4, "tcp://10.0.0.1:5001", 0, 1)
    with pytest.raises(ConfigError, match=r"tcp://10.0.0.1:5001 needs a group_key_file"):
        read_group_key(config(), member)
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"group_key_file .*: No such file"):
        read_group_key(config(group_key_file=path), member)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"group_key_file .* less than 16 bytes"):
        read_group_key(config(group_key_file=path), member)
    path.write_bytes(b"a secret of some bytes\n")
    assert read_group_key(config(group_key_file=path), member) == b"a secret of some bytes"


def test_on_the_loopback_interface_a_file_of_the_user_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    member = Membership(1, 4, "tcp://127.0.0.1:5001", 0, 1)
    key = read_group_key(config(), member)
    assert len(key) >= 32 and read_group_key(config(), member) == key
    (path,) = Path(tmp_path).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_can_read_or_place_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    member = Membership(1, 4, "tcp://127.0.0.1:5001", 0, 1)
    path = tmp_path / f"mergestep-group-{os.getuid()}.key"
    path.write_bytes(bytes(40))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="is not this user's alone; set group_key_file"):
        read_group_key(config(), member)
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(40))
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is not this user's alone"):
        read_group_key(config(), member)
