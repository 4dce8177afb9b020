"""Fixtures of engines that pull K/V from one another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from memory.peers import jobs
from memory.prefix.load_times import LoadTimes
from serve import LLM
from serve.engine.engine import Engine
from serve.scheduler.step_time import StepTimeModel


@pytest.fixture(autouse=True)
def pulling_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pulling always cheaper than computing, which the tiny model would otherwise prefer."""
    monkeypatch.setattr(LoadTimes, "seconds", lambda times, num_pages: 0.0)
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.0)
    monkeypatch.setattr(jobs, "ASK_S", 5.0)  # on a busy machine, too


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch):
    """Returns what makes each step of an engine take so many seconds more."""

    def slow(llm: LLM | Engine, seconds: float) -> None:
        loaded = llm.loaded if isinstance(llm, Engine) else llm._loaded
        runner = loaded.core._runner
        execute = runner.run

        def run(*args, **kwargs):
            time.sleep(seconds)
            return execute(*args, **kwargs)

        monkeypatch.setattr(runner, "run", run)

    return slow


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("a secret of the fleet")
    path.chmod(0o600)
    return path
