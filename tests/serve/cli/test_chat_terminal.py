"""`serve chat`: commands, messages of several lines, rates, keys and malformed streams."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from serve.cli.chat import Conversation, command, read_message
from serve.cli.chat_speakers import Message, Piece, ServerSpeaker
from serve.cli.main import app
from serve.errors import ConfigError
from serve.http.client import ApiCallError
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread


class Scripted:
    """A speaker that answers every conversation with the same pieces."""

    name = "scripted"

    def __init__(self, *pieces: Piece, num_tokens: int | None = None) -> None:
        self.pieces = pieces
        self.options: dict[str, Any] = {}
        self.num_tokens = num_tokens

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reply(self, messages: list[Message]) -> AsyncGenerator[Piece, None]:
        for piece in self.pieces:
            yield piece


def conversation(*pieces: Piece, num_tokens: int | None = None) -> Conversation:
    console = Console(file=io.StringIO(), width=200)
    return Conversation(Scripted(*pieces, num_tokens=num_tokens), console, "be brief")


def printed(talk: Conversation) -> str:
    text: str = talk.console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one \\", "two \\", "three"], "one \ntwo \nthree"),
        (['"""one', "  two", 'three""" rest'], "one\n  two\nthree"),
        (['"""one line"""'], "one line"),
        ([""], ""),
    ],
)
def test_several_lines(lines: list[str], message: str) -> None:
    rest = iter(lines)
    assert read_message("you> ", lambda prompt: next(rest)) == message
    assert next(rest, None) is None


def test_the_set_command() -> None:
    talk = conversation()
    for text in (
        "/set temperature 0.5",
        "/set max_tokens 7",
        "/set top_p 1",
        "/set top_p -",
        "/set seed x",
        "/set temperature 9",
        "/set temprature 1",
        "/set",
    ):
        command(talk, text)
    assert talk.speaker.options == {"temperature": 0.5, "max_tokens": 7}
    assert "/set seed needs a whole number" in printed(talk)
    assert "temperature must be between 0 and 2" in printed(talk)
    assert "temprature cannot be set; did you mean temperature?" in printed(talk)
    assert printed(talk).endswith("temperature 0.5, max_tokens 7\n")


def test_the_system_message() -> None:
    talk = conversation(Piece("yes"))
    asyncio.run(talk.turn("one", show_rate=False))
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    command(talk, "/system")
    assert len(talk.messages) == 3
    command(talk, "/system be long")
    assert talk.messages == [{"role": "system", "content": "be long"}]
    command(talk, "/sytem x")
    assert "there is no /sytem; did you mean /system?" in printed(talk)


def test_reasoning_is_shown_but_not_sent_again() -> None:
    talk = conversation(Piece("hm, ", is_reasoning=True), Piece("yes"), num_tokens=4)
    asyncio.run(talk.turn("one", show_rate=True))
    assert printed(talk).startswith("hm, yes\n4 tokens in 0.00 s, ")
    assert talk.messages[-1] == {"role": "assistant", "content": "yes"}


def test_the_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the file, else from the environment."""
    seen: list[str | None] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "m"}]})

    async def ask(*keys: str | None) -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for key in keys:
            async with ServerSpeaker(url, {}, model=None, api_key=key):
                pass
        await runner.cleanup()

    asyncio.run(ask("secret-1", None))
    assert seen == ["Bearer secret-1", None]
    key = tmp_path / "key"
    key.write_text("sécret\n")
    result = CliRunner().invoke(app, ["chat", "--url", "x", "--api-key-file", str(key)])
    assert result.exit_code == 2 and "it is not ASCII text" in result.stderr
    monkeypatch.setenv("MERGESTEP_API_KEY", "a\nb")
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", "-m", "hi"])
    assert result.exit_code == 2 and "characters that HTTP cannot send" in result.stderr


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": [1]}', '{"choices": 1}', "{}"])
def test_a_stream_of_another_api(event: str) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"data: {event}\n\n", content_type="text/event-stream")

    async def talk() -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with (
                ServerSpeaker(url, {}, model="m", api_key=None) as speaker,
                aclosing(speaker.reply([])) as pieces,
            ):
                async for _ in pieces:
                    pass
        finally:
            await runner.cleanup()

    with pytest.raises(ApiCallError, match="stream"):
        asyncio.run(talk())


def test_one_of_several_models_must_be_named() -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    async def enter() -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with ServerSpeaker(url, {}, model=None, api_key=None):
                pass
        finally:
            await runner.cleanup()

    with pytest.raises(ConfigError, match="several models; name one: a, b"):
        asyncio.run(enter())


def test_options_reach_the_server() -> None:
    engine = FakeEngine()
    with ServerThread(engine) as server:
        arguments = ["chat", "--url", server.url, "-m", "hi", "--temperature", "0.5"]
        assert CliRunner().invoke(app, [*arguments, "--max-tokens", "5"]).exit_code == 0
    params = engine.submitted[0][1]
    assert (params.temperature, params.max_tokens) == (0.5, 5)
