"""Every example runs, both the files and the Python in the documentation."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.support.engine.checkpoints import checkpoint
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# documents, and the greedy output of the embedded model in them
DOCUMENTS = {"README.md": "fox", "docs/library.md": "The opposite of hot is cold."}
DOCUMENTS["docs/structured-output.md"] = '{"opposite":'
IN_PROCESS = ("offline", "streaming", "remote_memory")
OVER_HTTP = ("openai_client", "chat_http")
ELSEWHERE = ("train_default_model",)  # has its own test, since it takes a long time


@pytest.mark.process
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


@pytest.mark.parametrize(("name", "expected"), DOCUMENTS.items())
def test_python_in_documents_runs(
    name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})
    assert expected in capsys.readouterr().out
