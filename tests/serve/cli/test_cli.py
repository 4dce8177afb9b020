"""The `serve` command: options, errors, chat, and the life of a server process."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from serve.cli.chat import Conversation, run_chat
from serve.cli.chat_speakers import Piece, ServerSpeaker
from serve.cli.config_file import parse_size
from serve.cli.main import app
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread

ROOT = Path(__file__).parents[3]


def invoke(*arguments: str, input_text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=input_text)


def test_version_and_help() -> None:
    assert invoke("version").output.startswith("mergestep ")
    for command in ("run", "chat", "bench", "plan", "eval"):
        assert invoke(command, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [("ops", {"--quick", "--json"}), ("io", {"--quick", "--json", "--dir"})],
)
def test_each_benchmark_has_its_own_help(benchmark: str, options: set[str]) -> None:
    result = invoke("bench", benchmark, "--help")
    assert result.exit_code == 0
    assert set(re.findall(r"--[a-z-]+", result.output)) == {"--help"} | options
    assert f"bench {benchmark} [OPTIONS]" in result.output


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


FILE = str(Path(__file__))
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "--dtype", "int3"), "dtype must be one of"),
        (("run", "--backend", "gpu", "--port", "0"), "backend: unknown backend 'gpu'"),
        (("run", "--port", "99999"), "port must be between 0 and 65535, not 99999"),
        (("run", "--host", ""), "host must be"),
        (("run", "--host", "127." + "x" * 300), "host is not a name or an address"),
        (("run", "--kv-cache-bytes", "9" * 5000), "is not a size such as"),
        (("run", "--seed", "9" * 5000), "--seed"),
        (("run", "--seed", "9" * 50), "seed is too large a number"),
        (("run", "--backlog", "9" * 10), "backlog must be positive, at most 2.14748e+09"),
        (("run", "--keepalive-s", "1e300"), "keepalive_s must be positive, at most"),
        (("run", "--drain-s", "nan"), "drain_s must be a number of seconds"),
        (("run", "--max-num-seqs", "0"), "max_num_seqs must be a positive integer, not 0"),
        (("run", "--served-model-name", ""), "served_model_name must be a non-empty"),
        (("run", "--kv-cache-dir", FILE, "--port", "0"), f"kv_cache_dir {FILE} is a file"),
        (("run", "--kv-cache-dir", f"{FILE}/x", "--port", "0"), f"{FILE}/x: Not a directory"),
        (("run", "--kv-page-bytes", "4T", "--port", "0"), "kv_page_bytes 4398046511104 is more"),
        (("run", "--kv-cache-bytes", "1e9"), "--kv-cache-bytes"),
        (("run", "--log-level", "loud"), "--log-level"),
        (("run", "--host", "192.0.2.1"), "host 192.0.2.1 can be reached from other machines"),
        (("bench", "--qps", "0"), "qps must be a positive number or inf, not '0'"),
        (("bench", "--requests", "1", "--duration", "1"), "either requests or duration"),
        (("bench", "--requests", "0"), "requests must be at least 1, not 0"),
        (("bench", "--duration", "nan"), "duration must be a positive number"),
        (("bench", "--warmup", "-1"), "warmup must not be negative"),
        (("bench", "--json", "/nowhere/x"), "--json: there is no folder /nowhere"),
        (("bench", "--url", "ftp://x"), "url ftp://x is not the address of a server"),
        (("bench", "--qps", "2", "io"), "`serve bench io [OPTIONS]`"),
        (("bench", "ops", "--qps", "2"), "No such option: --qps"),
        (("bench", "io", "--dir", "/nowhere/at/all"), "--dir /nowhere/at/all does not exist"),
        (("bench", "io", "--dir", FILE), f"--dir {FILE} is a file"),
        (("bench", "--quick"), "No such option: --quick"),
        (("eval", "--text", "/nowhere/x"), "--text /nowhere/x: No such file or directory"),
        (("eval", "--precision", "int9"), "dtype must be one of"),
    ],
)
def test_invalid_options_exit_with_2(arguments: tuple[str, ...], expected: str) -> None:
    assert_one_line(invoke(*arguments), 2, expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "/nonexistent/model", "--port", "0"), "/nonexistent/model does not exist"),
        (("run", FILE, "--port", "0"), f"{FILE} is a file"),
        (("run", "a\x1b[31m\0b", "--port", "0"), "model directory a?[31m?b does not exist"),
        (("bench", "--url", NOWHERE), f"cannot reach {NOWHERE}: Connection refused"),
        (("chat", "--url", NOWHERE, "-m", "hi"), f"cannot reach {NOWHERE}: Connection refused"),
        (("chat", "/nonexistent/model", "-m", "hi"), "/nonexistent/model does not exist"),
        (("eval", "/nonexistent/model"), "/nonexistent/model does not exist"),
    ],
)
def test_failures_exit_with_1(arguments: tuple[str, ...], expected: str) -> None:
    assert_one_line(invoke(*arguments), 1, expected)


def assert_one_line(result: Any, exit_code: int, expected: str) -> None:
    """Asserts that the output has the text, but no traceback, class name or error number."""
    assert result.exit_code == exit_code
    assert expected in re.sub(r"\s*\n[│ ]*", " ", result.output)
    assert not re.search(r"Traceback|Errno|[a-z]Error", result.output)


def test_a_benchmark_without_native_kernels_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.cpu.native_library._native", None)
    monkeypatch.setattr("ops.cpu.native_library._why", "no such module", raising=False)
    result = invoke("bench", "ops", "--quick")
    assert result.exit_code == 1
    assert "needs the native kernels" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("run", "--port", str(port))
    assert_one_line(result, 1, f"host 127.0.0.1, port {port}: Address already in use")


def test_a_server_with_another_api_is_one_line() -> None:
    with ServerThread(FakeEngine()) as server:
        assert_one_line(invoke("chat", "--url", f"{server.url}/x", "-m", "hi"), 1, "/x")


def test_chat_sends_one_message() -> None:
    with ServerThread(FakeEngine(reply="I am\n[bold]fake[/bold] 👍")) as server:
        result = invoke("chat", "--url", server.url, "-m", "who?", "--system", "be brief")
    assert result.exit_code == 0
    assert result.output == "I am\n[bold]fake[/bold] 👍\n"


def test_chat_reads_piped_input() -> None:
    engine = FakeEngine()
    with ServerThread(engine) as server:
        result = invoke("chat", "--url", server.url, input_text="two\nlines\n")
    assert "Hello there" in result.output
    assert engine.submitted[0][0] == [{"role": "user", "content": "two\nlines"}]


def test_chat_in_process() -> None:
    result = invoke("chat", str(checkpoint("llama")), "-m", "hi", "--max-tokens", "5")
    assert result.exit_code == 0, result.output


def test_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Turns are sent again until /reset, and an unknown command does not end the chat."""
    lines = iter(["/help", "one", "", "two", "/reset", "three", "/what", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys, "stdin", _Terminal())
    engine = FakeEngine(reply="yes")
    with ServerThread(engine) as server:
        speaker = ServerSpeaker(server.url, {}, model=None, api_key=None)
        run_chat(speaker, system="s", message=None)
    sent = [[message["content"] for message in prompt] for prompt, _ in engine.submitted]
    assert sent == [["s", "one"], ["s", "one", "yes", "two"], ["s", "three"]]
    output = capsys.readouterr().out
    assert output.count("/reset  ") == 2
    assert "fake" in output


def test_a_model_cannot_steer_the_terminal() -> None:
    class Speaker:
        name = "evil"

        async def reply(self, messages: Any) -> AsyncGenerator[Piece, None]:
            yield Piece("a\x1b]0;title\x07b\n\tc\x9b2J")

    console = Console(force_terminal=True, file=io.StringIO())
    conversation = Conversation(Speaker(), console, None)  # type: ignore[arg-type]
    asyncio.run(conversation.turn("x", show_rate=False))
    assert console.file.getvalue() == "a]0;titleb\n        c2J\n"  # type: ignore[attr-defined]


def test_interrupting_an_answer_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    engine = FakeEngine(reply="word ", repeat=1000, step_s=0.01)
    lines = iter(["one", "two"])

    def next_line(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        threading.Thread(target=interrupt_answer, args=(len(engine.submitted) + 1,)).start()
        return line

    def interrupt_answer(number: int) -> None:
        deadline = time.monotonic() + 30
        while not (len(engine.submitted) == number and engine.running):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("builtins.input", next_line)
    monkeypatch.setattr(sys, "stdin", _Terminal())
    with ServerThread(engine) as server:
        speaker = ServerSpeaker(server.url, {}, model=None, api_key=None)
        run_chat(speaker, system=None, message=None)
        deadline = time.monotonic() + 10
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(engine.aborted) == 2
    assert capsys.readouterr().out.count("stopped") == 2
    second = engine.submitted[1][0]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"].startswith("word")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.process
def test_a_server_starts_and_drains(tmp_path: Path) -> None:
    """The server prints a curl command when it is ready, and a signal ends it with code 0."""
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
            end_s = time.monotonic() + 20  # the summary waits for the trial of the chat template
            while f"curl http://127.0.0.1:{port}/v1/chat/completions" not in log.read_text():
                assert time.monotonic() < end_s
                time.sleep(0.05)
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
