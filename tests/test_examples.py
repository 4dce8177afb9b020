"""Every example runs: as it is printed in the documentation, against a real or scripted engine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from checkpoints import checkpoint
from fakes_http import FakeEngine, ServerThread

EXAMPLES = Path(__file__).parent.parent / "examples"
IN_PROCESS = ("offline", "streaming")
OVER_HTTP = ("openai_client", "chat_http")
ELSEWHERE = ("train_default_model",)  # takes a long time; has its own test


@pytest.mark.parametrize("name", IN_PROCESS)
def test_in_process(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"examples.{name}").main(str(checkpoint("llama")))
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.parametrize("name", OVER_HTTP)
def test_over_http(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerThread(FakeEngine(reply="I am a 👍🏽 fake")) as server:
        importlib.import_module(f"examples.{name}").main(server.url)
    assert "I am a 👍🏽 fake" in capsys.readouterr().out


def test_all_are_covered_and_short() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py") if path.stem != "__init__"}
    assert set(files) == {*IN_PROCESS, *OVER_HTTP, *ELSEWHERE}
    for name in (*IN_PROCESS, *OVER_HTTP):
        assert len(files[name].read_text().splitlines()) < 60
