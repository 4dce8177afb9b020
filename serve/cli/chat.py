"""`serve chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import uvloop
from rich.console import Console

from serve.cli.chat_speakers import SETTABLE, Message, Speaker
from serve.cli.reporting import printable
from serve.cli.run_settings import suggestion
from serve.errors import ConfigError, MergestepError, RequestError, message_of
from serve.sampling_params import SamplingParams
from serve.signals import ended_by_signals

HELP = """\
/reset             forget the conversation
/system [TEXT]     show the system message, or start again with this one
/set [NAME VALUE]  show or change the sampling parameters: temperature 0.7,
                   max_tokens 200, top_p, top_k, min_p, seed, the
                   penalties (presence_penalty, ...);
                   the value - restores the model's default
/help              show this text
/quit              leave (Ctrl-D does so too)
Ctrl-C             stop the answer
\"\"\"                begin several lines, which end at the next \"\"\";
                   a \\ at the end of a line also continues it"""

# The model's text must not move the cursor or change the title of the window.
_CONTROL_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
_QUOTES = '"""'


class Conversation:
    """A conversation with a model, printed on the console."""

    def __init__(self, speaker: Speaker, console: Console, system: str | None) -> None:
        self.speaker = speaker
        self.console = console
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    async def turn(self, text: str, *, show_rate: bool) -> None:
        """Prints the answer as it arrives; after Ctrl-C its part so far stays in the messages."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        ends_line = True
        started_s = first_s = time.perf_counter()
        try:
            async with aclosing(self.speaker.reply(self.messages)) as reply:
                async for piece in reply:
                    if not answer:
                        first_s = time.perf_counter()
                    self._write(piece.text, "dim" if piece.is_reasoning else None)
                    if not piece.is_reasoning:
                        answer.append(piece.text)
        except MergestepError:
            ends_line = bool(answer)
            answer.clear()
            raise
        finally:
            if ends_line:
                self._write("\n")
            if not answer:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
        if show_rate:
            now_s = time.perf_counter()
            rate = _rate(self.speaker.num_tokens, first_s - started_s, now_s - started_s)
            self.note(rate)

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _write(self, text: str, style: str | None = None) -> None:
        if self.console.is_terminal:
            text = text.translate(_CONTROL_CHARACTERS)
        self.console.print(text, end="", style=style, markup=False, highlight=False, soft_wrap=True)


def _rate(num_tokens: int | None, first_s: float, total_s: float) -> str:
    if not num_tokens:
        return f"{total_s:.2f} s"
    rate = num_tokens / total_s
    text = f"{num_tokens} tokens in {total_s:.2f} s, {rate:.1f} tokens/s"
    return f"{text}, the first after {first_s:.2f} s"


def run_chat(speaker: Speaker, *, system: str | None, message: str | None) -> None:
    """Runs one turn with `message` or piped input; else reads turns until /quit."""
    console = Console(highlight=False)
    conversation = Conversation(speaker, console, system)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                raise ConfigError("the input is empty")
        with ended_by_signals(), _noted("loading the model"):
            runner.run(_call(speaker.__aenter__()))
        try:
            if message is not None:
                runner.run(conversation.turn(message, show_rate=False))
            else:
                _interact(runner, conversation)
        finally:
            runner.run(_call(speaker.__aexit__()))


@contextmanager
def _noted(text: str) -> Iterator[None]:
    """Shows the text on a terminal meanwhile, without hiding the cursor: a signal may end the
    process."""
    is_shown = sys.stderr.isatty()
    if is_shown:
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")


async def _call(awaitable: Awaitable[object]) -> None:
    await awaitable


def _interact(runner: asyncio.Runner, conversation: Conversation) -> None:
    console = conversation.console
    name = conversation.speaker.name
    console.print(name, style="bold", markup=False, end="")
    conversation.note("  /help for commands, Ctrl-D to leave")
    prompt = _prompt(console)
    while True:
        try:
            text = read_message(prompt)
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            conversation.note("\n/quit or Ctrl-D to leave")
            continue
        if text == "/quit":
            return
        if text.startswith("/"):
            command(conversation, text)
        elif text:
            _one_turn(runner, conversation, text)


def read_message(prompt: str, read: Callable[[str], str] | None = None) -> str:
    """Reads a line, or several between two \"\"\" or joined by backslashes at their ends.

    EOFError and KeyboardInterrupt come from input().
    """
    read = read or input
    text = read(prompt).strip()
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES)
        while _QUOTES not in text:
            text += "\n" + read("...> ")
        return text[: text.index(_QUOTES)].strip()
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read("...> ").rstrip()
    return text


def command(conversation: Conversation, text: str) -> None:
    """Runs a command, a line that begins with a slash."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    if name == "/reset":
        conversation.reset(conversation.system)
        conversation.note("the conversation is empty again")
    elif name == "/system":
        if argument:
            conversation.reset(argument)
        conversation.note(f"system message: {conversation.system or 'none'}")
    elif name == "/set":
        _set(conversation, argument.split())
    else:
        if name != "/help":
            known = ("/reset", "/system", "/set", "/help", "/quit")
            conversation.note(f"there is no {name}{suggestion(name, known)}")
        conversation.console.print(HELP, markup=False, highlight=False)


def _set(conversation: Conversation, words: list[str]) -> None:
    options = conversation.speaker.options
    if words:
        name, value = words[0], words[1] if len(words) == 2 else ""
        kind = SETTABLE.get(name)
        if kind is None:
            conversation.note(f"{name} cannot be set{suggestion(name, SETTABLE)}")
            return
        if value == "-":
            options.pop(name, None)
        else:
            try:
                number = kind(value)
                changes: dict[str, Any] = {name: number}
                SamplingParams(**changes)
            except ValueError:
                expected = "a whole number" if kind is int else "a number"
                conversation.note(f"/set {name} needs {expected}, or - for the model's default")
                return
            except RequestError as error:
                conversation.note(str(error))
                return
            options[name] = number
    text = ", ".join(f"{name} {value}" for name, value in options.items())
    conversation.note(text or "all parameters have the model's defaults")


def _one_turn(runner: asyncio.Runner, conversation: Conversation, text: str) -> None:
    console = conversation.console
    try:
        runner.run(conversation.turn(text, show_rate=True))
    except KeyboardInterrupt:
        conversation.note("stopped")
    except MergestepError as exc:
        console.print("[red]error[/red]: ", end="")
        console.print(printable(message_of(exc)), markup=False, highlight=False)


def _prompt(console: Console) -> str:
    try:
        import readline  # noqa: F401  # line editing and history for input()
    except ImportError:
        return "you> "
    # \001 and \002 mark characters that have no width, for readline.
    return "\001\033[1;36m\002you>\001\033[0m\002 " if console.is_terminal else "you> "
