"""The limit of open files: it is raised, or the start names it with what is needed."""

from __future__ import annotations

import resource
from typing import NamedTuple

import pytest

from serve.errors import ConfigError
from serve.http.edge import file_limit
from serve.http.edge.file_limit import allowed_connections, raise_file_limit


class Limit(NamedTuple):
    soft: int
    hard: int


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> dict[str, Limit]:
    """The process's limit, which tests set, and 10 open files."""
    now = {"files": Limit(1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: now["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: now.update(files=Limit(*value)))
    monkeypatch.setattr(file_limit.Path, "iterdir", lambda _: iter(range(10)))
    return now


NEEDED = 10 + 32 + 16  # beside connections


def test_the_soft_limit_is_raised_to_the_hard_one(limit: dict[str, Limit]) -> None:
    limit["files"] = Limit(64, 4096)
    raise_file_limit(20_000)
    assert limit["files"] == (4096, 4096)
    limit["files"] = Limit(64, resource.RLIM_INFINITY)
    raise_file_limit(20_000)
    assert limit["files"].soft == 65_536
    raise_file_limit(100_000)
    assert limit["files"].soft == 100_000 + NEEDED
    limit["files"] = Limit(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    raise_file_limit(20_000)
    assert limit["files"].soft == resource.RLIM_INFINITY


def test_a_hard_limit_without_room_for_a_connection_is_an_error(limit: dict[str, Limit]) -> None:
    limit["files"] = Limit(16, NEEDED)
    with pytest.raises(ConfigError) as caught:
        raise_file_limit(500)
    text = str(caught.value)
    assert f"the limit of open files (ulimit -n) is {NEEDED}; the server needs" in text
    assert f"{NEEDED + 500} for max_connections 500: run `ulimit -n {NEEDED + 500}`" in text
    limit["files"] = Limit(16, NEEDED + 1)
    raise_file_limit(500)


@pytest.mark.parametrize(
    ("files", "wanted", "allowed", "is_told"),
    [
        (65_536, 20_000, 20_000, False),
        (20_000, 20_000, 20_000 - NEEDED, False),  # 20,000 is the default: no warning
        (1000, 20_000, 1000 - NEEDED, True),
        (5000, 6000, 5000 - NEEDED, True),
        (20, 20_000, 1, True),
        (100, 42, 42, False),
    ],
)
def test_fewer_connections_than_asked_for_are_told(
    limit: dict[str, Limit],
    caplog: pytest.LogCaptureFixture,
    files: int,
    wanted: int,
    allowed: int,
    is_told: bool,
) -> None:
    limit["files"] = Limit(files, files)
    assert allowed_connections(wanted) == allowed
    needed = wanted + NEEDED
    told = (
        f"max_connections is {allowed} in place of {wanted}: the limit of open files is {files},"
        f" and {needed} are needed; `ulimit -n {needed}`"
    )
    assert (told in caplog.text) == is_told
    assert bool(caplog.records) == is_told
