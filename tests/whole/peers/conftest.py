"""Fixtures of engines that pull K/V from one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.peers import jobs
from memory.prefix.load_times import LoadTimes
from serve.scheduler.step_time import StepTimeModel


@pytest.fixture(autouse=True)
def pulling_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pulling always cheaper than computing, which the tiny model would otherwise prefer."""
    monkeypatch.setattr(LoadTimes, "seconds", lambda times, num_pages: 0.0)
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.0)
    monkeypatch.setattr(jobs, "ASK_S", 5.0)  # on a busy machine, too


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("a secret of the fleet")
    path.chmod(0o600)
    return path
