"""The `serve` command: options, errors, chat, and the life of a server process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import checkpoint
from fakes_http import FakeEngine, ServerThread
from rich.console import Console
from typer.testing import CliRunner

from serve import terminal_chat
from serve.cli import app, parse_size
from serve.config import EngineConfig

ROOT = Path(__file__).parent.parent


def invoke(*arguments: str, input_text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=input_text)


def test_version_and_help() -> None:
    assert invoke("version").output.startswith("mergestep ")
    for command in ("run", "chat", "bench"):
        assert invoke(command, "--help").exit_code == 0


def test_every_engine_setting_is_an_option() -> None:
    command: Any = typer.main.get_command(app)
    options = {parameter.name for parameter in command.commands["run"].params}
    assert {item.name for item in fields(EngineConfig)} <= options
    defaults = {item.name: item.default for item in fields(EngineConfig)}
    for parameter in command.commands["run"].params:
        if parameter.name in defaults:
            assert parameter.default == defaults[parameter.name]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64k", 65536), ("64KiB", 65536), ("1.5 G", 3 << 29), ("2GiB", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1Q", "1e9"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "/nonexistent/model", "--port", "0"), "/nonexistent/model"),
        (("run", "--dtype", "int3"), "dtype"),
        (("run", "--port", "99999"), "port"),
        (("run", "--max-num-seqs", "0"), "max_num_seqs"),
        (("bench", "--qps", "0"), "qps"),
        (("bench", "--requests", "1", "--duration", "1"), "duration"),
        (("bench", "ops", "--json", "x.json", "--qps", "2"), "--qps, --json: `serve bench ops`"),
        (("bench", "io", "--qps", "2"), "--qps: `serve bench io` takes --quick and --dir only"),
        (("bench", "io", "--dir", "/nowhere/at/all"), "/nowhere/at/all"),
        (("bench", "--quick"), "--quick"),
        (("bench", "--dir", "."), "--dir"),
        (("bench", "--url", "http://127.0.0.1:9"), "connection_failed"),
        (("chat", "--url", "http://127.0.0.1:9", "-m", "hi"), "connection_failed"),
        (("chat", "/nonexistent/model", "-m", "hi"), "/nonexistent/model"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert said in result.output.replace("\n", "")
    assert "Traceback" not in result.output


def test_measuring_kernels_that_are_not_built_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.native._native", None)
    monkeypatch.setattr("ops.native._why", "no such module", raising=False)
    result = invoke("bench", "ops", "--quick")
    assert result.exit_code == 1
    assert "needs the native kernels" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = invoke("run", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def test_chat_says_one_thing() -> None:
    with ServerThread(FakeEngine(reply="I am\n[bold]fake[/bold] 👍")) as server:
        result = invoke("chat", "--url", server.url, "-m", "who?", "--system", "be brief")
    assert result.exit_code == 0
    assert result.output == "I am\n[bold]fake[/bold] 👍\n"


def test_chat_reads_what_is_piped_in() -> None:
    engine = FakeEngine()
    with ServerThread(engine) as server:
        result = invoke("chat", "--url", server.url, input_text="two\nlines\n")
    assert "Hello there" in result.output
    assert engine.submitted[0][0] == [{"role": "user", "content": "two\nlines"}]


def test_chat_in_process() -> None:
    result = invoke("chat", str(checkpoint("llama")), "-m", "hi", "--max-tokens", "5")
    assert result.exit_code == 0, result.output


def test_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Turns are remembered, /reset forgets, errors do not end it."""
    lines = iter(["/help", "one", "", "two", "/reset", "three", "/what", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys, "stdin", _Terminal())
    engine = FakeEngine(reply="yes")
    with ServerThread(engine) as server:
        speaker = terminal_chat.ServerSpeaker(
            server.url, model=None, max_tokens=None, temperature=None
        )
        terminal_chat.chat(speaker, system="s", message=None)
    told = [[message["content"] for message in prompt] for prompt, _ in engine.submitted]
    assert told == [["s", "one"], ["s", "one", "yes", "two"], ["s", "three"]]
    output = capsys.readouterr().out
    assert output.count("/reset   forget") == 2
    assert "fake" in output


def test_a_model_cannot_steer_the_terminal() -> None:
    class Speaker:
        name = "evil"

        async def reply(self, messages: Any) -> AsyncGenerator[str, None]:
            yield "a\x1b]0;title\x07b\n\tc\x9b2J"

    console = Console(force_terminal=True, file=io.StringIO())
    conversation = terminal_chat.Conversation(Speaker(), console, None)  # type: ignore[arg-type]
    asyncio.run(conversation.turn("x", show_rate=False))
    assert console.file.getvalue() == "a]0;titleb\n        c2J\n"  # type: ignore[attr-defined]


def test_interrupting_an_answer_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    engine = FakeEngine(reply="word ", repeat=1000, step_s=0.01)
    said = iter(["one", "two"])

    def next_line(prompt: str) -> str:
        line = next(said, None)
        if line is None:
            raise EOFError
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return line

    monkeypatch.setattr("builtins.input", next_line)
    monkeypatch.setattr(sys, "stdin", _Terminal())
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        with ServerThread(engine) as server:
            speaker = terminal_chat.ServerSpeaker(
                server.url, model=None, max_tokens=None, temperature=None
            )
            terminal_chat.chat(speaker, system=None, message=None)
            deadline = time.monotonic() + 2
            while engine.running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(engine.aborted) == 2
    finally:
        signal.signal(signal.SIGALRM, before)
    assert capsys.readouterr().out.count("stopped") == 2
    second = engine.submitted[1][0]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"].startswith("word")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_life_of_a_server(tmp_path: Path) -> None:
    """Ready is printed with a curl to paste; a signal drains; the exit code is 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "serve", "run", str(checkpoint("llama")), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _wait_ready(port, process)
            assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in log.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.05)
    pytest.fail("the server did not become ready")
