"""The process that is started when a worker may be lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from serve.group import launch
from serve.group.launch import LocalWorkers

LONG_S = 2 * launch._SUSPECT_S


@pytest.fixture
def started(monkeypatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Makes workers processes that wait for their standard input; returns them."""
    found: list[subprocess.Popen[bytes]] = []

    def spawn(this: LocalWorkers) -> subprocess.Popen[bytes]:
        found.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return found[-1]

    monkeypatch.setattr(LocalWorkers, "_spawn", spawn)
    yield found
    for process in found:
        process.kill()
        process.communicate()


@pytest.fixture
def workers() -> Iterator[LocalWorkers]:
    made = LocalWorkers()
    yield made
    made.close()


def test_a_silent_worker_has_one_process_started(started, workers):
    workers.note_silence(launch._SUSPECT_S / 2)
    assert not started
    for _ in range(3):
        workers.note_silence(LONG_S)
    assert len(started) == 1
    assert workers._take_spare() is started[0]
    assert workers._take_spare() is None


def test_a_process_that_is_not_needed_ends(started, workers, monkeypatch):
    workers.note_silence(LONG_S)
    workers.note_silence(0.0)
    assert started[0].poll() is None
    monkeypatch.setattr(launch, "_UNUSED_S", 0.0)
    workers.note_silence(LONG_S)  # still silent
    assert started[0].poll() is None
    workers.note_silence(0.0)
    assert started[0].poll() is not None
    assert workers._take_spare() is None


def test_a_process_that_has_ended_is_not_taken(started, workers):
    workers.note_silence(LONG_S)
    started[0].kill()
    started[0].wait()
    assert workers._take_spare() is None


def test_it_ends_with_the_engine(started):
    workers = LocalWorkers()
    workers.note_silence(LONG_S)
    workers.close()
    assert started[0].poll() is not None
