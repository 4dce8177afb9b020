"""`serve chat`: a conversation in the terminal, with a model in this process or a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, Protocol, Self

import uvloop
from rich.console import Console

from serve.engine import Engine
from serve.errors import ConfigError, GenerationError, MergestepError, plain
from serve.http.client import ApiClient
from serve.request import FinishReason, SamplingParams

HELP = """\
/reset   forget the conversation
/help    this text
/quit    leave (so does Ctrl-D)
Ctrl-C   stop the answer that is being written"""

Message = dict[str, Any]
# What a model says must not move the cursor or retitle the window.
_CONTROL_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})


class Speaker(Protocol):
    """Who answers. Used inside `async with`; `name` is known then."""

    name: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def reply(self, messages: list[Message]) -> AsyncGenerator[str, None]: ...


class EngineSpeaker:
    """A model in this process."""

    def __init__(
        self, engine: Engine, *, max_tokens: int | None, temperature: float | None
    ) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._temperature = temperature
        self.name = engine.model_name

    async def __aenter__(self) -> Self:
        await self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.shutdown()

    async def reply(self, messages: list[Message]) -> AsyncGenerator[str, None]:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = self._engine.generation_defaults
        values: dict[str, Any] = {
            name: defaults[name] for name in names if defaults.get(name) is not None
        }
        if self._temperature is not None:
            values["temperature"] = self._temperature
        params = SamplingParams(max_tokens=self._max_tokens, **values)
        stream = self._engine.submit_chat(messages, params)
        try:
            await stream.accepted()
            async for delta in stream:
                if delta.text:
                    yield delta.text
                if delta.finish_reason is FinishReason.ERROR:
                    raise GenerationError(delta.error or "the engine failed")
        finally:
            stream.abort()


class ServerSpeaker:
    """A server that speaks the OpenAI API."""

    def __init__(
        self, url: str, *, model: str | None, max_tokens: int | None, temperature: float | None
    ) -> None:
        self._url = url
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        self.name = model or ""

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._url)
        try:
            self.name = self.name or str((await self._client.models())[0]["id"])
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def reply(self, messages: list[Message]) -> AsyncGenerator[str, None]:
        options = {name: value for name, value in self._options.items() if value is not None}
        body = {"model": self.name, "messages": messages, **options}
        async with aclosing(self._client.stream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


class Conversation:
    """The messages so far, and one turn of them."""

    def __init__(self, speaker: Speaker, console: Console, system: str | None) -> None:
        self._speaker = speaker
        self._console = console
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._first)

    def reset(self) -> None:
        self.messages = list(self._first)

    async def turn(self, text: str, *, show_rate: bool) -> None:
        """Prints the answer as it comes. What was written before a Ctrl-C stays remembered."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        is_on_a_line = True
        started_s = time.perf_counter()
        try:
            async with aclosing(self._speaker.reply(self.messages)) as reply:
                async for piece in reply:
                    pieces.append(piece)
                    self._write(piece)
        except MergestepError:
            is_on_a_line = bool(pieces)
            pieces.clear()
            raise
        finally:
            if is_on_a_line:
                self._write("\n")
            if not pieces:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if show_rate:
            elapsed_s = time.perf_counter() - started_s
            self._console.print(f"[dim]{len(pieces)} pieces in {elapsed_s:.1f} s[/dim]")

    def _write(self, text: str) -> None:
        if self._console.is_terminal:
            text = text.translate(_CONTROL_CHARACTERS)
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def chat(speaker: Speaker, *, system: str | None, message: str | None) -> None:
    """With `message`, or input that is no terminal: one turn. Else until /quit."""
    console = Console(highlight=False)
    conversation = Conversation(speaker, console, system)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                raise ConfigError("the input is empty: there is nothing to say")
        status = Console(stderr=True).status("loading the model")
        with status:
            runner.run(_call(speaker.__aenter__()))
        try:
            if message is not None:
                runner.run(conversation.turn(message, show_rate=False))
            else:
                _interact(runner, conversation, console, speaker.name)
        finally:
            runner.run(_call(speaker.__aexit__()))


async def _call(awaitable: Awaitable[object]) -> None:
    await awaitable


def _interact(
    runner: asyncio.Runner, conversation: Conversation, console: Console, name: str
) -> None:
    console.print(f"[bold]{name}[/bold]  [dim]/help for commands, Ctrl-D to leave[/dim]")
    while True:
        try:
            text = input(_prompt(console)).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/quit or Ctrl-D to leave[/dim]")
            continue
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            console.print("[dim]forgotten[/dim]")
        elif text.startswith("/"):
            console.print(HELP, markup=False, highlight=False)
        elif text:
            _one_turn(runner, conversation, console, text)


def _one_turn(
    runner: asyncio.Runner, conversation: Conversation, console: Console, text: str
) -> None:
    try:
        runner.run(conversation.turn(text, show_rate=True))
    except KeyboardInterrupt:
        console.print("[dim]stopped[/dim]")
    except MergestepError as exc:
        console.print("[red]error[/red]: ", end="")
        console.print(plain(exc), markup=False, highlight=False)


def _prompt(console: Console) -> str:
    try:
        import readline  # noqa: F401  # line editing and history for input()
    except ImportError:
        return "you> "
    # \001 and \002 tell readline which characters take no room on the screen.
    return "\001\033[1;36m\002you>\001\033[0m\002 " if console.is_terminal else "you> "
