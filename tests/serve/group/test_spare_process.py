"""Processes of workers: the one that is started when a worker may be lost, those that are stuck
while they start, and the folders of engines that were killed with all their workers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.errors import ConfigError, MergestepError
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


def test_no_process_can_be_started(workers, monkeypatch):
    """What watches for losses goes on."""
    monkeypatch.setattr(LocalWorkers, "_spawn", _no_memory)
    workers.note_silence(LONG_S)
    assert workers._take_spare() is None


def _no_memory(this: LocalWorkers) -> subprocess.Popen[bytes]:
    raise OSError(12, "Cannot allocate memory")


def test_a_stopped_process_is_seen_while_it_starts(started, workers, monkeypatch):
    monkeypatch.setattr(launch, "_STOPPED_START_S", 0.2)

    def stop() -> None:
        os.kill(started[0].pid, signal.SIGSTOP)

    began_s = time.monotonic()
    with pytest.raises(MergestepError, match="rank 1 is stuck"):
        workers.start([1], stop)
    assert time.monotonic() < began_s + launch._IDLE_START_S
    assert started[0].poll() is not None


def test_a_process_that_does_nothing_is_seen_while_it_starts(started, workers, monkeypatch):
    monkeypatch.setattr(launch, "_IDLE_START_S", 0.3)
    with pytest.raises(MergestepError, match="rank 1 is stuck"):
        workers.start([1])


@pytest.fixture
def own_tmp(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_dead_engines_are_removed(own_tmp, monkeypatch):
    used = LocalWorkers()
    left, young = own_tmp / f"{launch.FOLDER_PREFIX}left", own_tmp / f"{launch.FOLDER_PREFIX}new"
    other = own_tmp / "of-another-program"
    for folder in (left, young, other):
        folder.mkdir()
        (folder / "engine").touch()
    for folder in (left, other, Path(used._folder.name)):
        os.utime(folder, (0, 0))
    LocalWorkers().close()
    assert sorted(own_tmp.iterdir()) == sorted([young, other, Path(used._folder.name)])
    used.close()


def test_a_temporary_directory_with_a_long_path_is_named(own_tmp, monkeypatch):
    deep = own_tmp / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        LocalWorkers()
    assert not list(deep.iterdir())
