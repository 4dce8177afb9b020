"""What a format of tool calls and a format of reasoning are: the rows of the tables."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules


def random_call_id(name: str, number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


class Syntax(Protocol):
    """How the calls of a format are written. All methods are about what follows a begin marker."""

    def block(self, reader: Reader) -> Wait[bool]:
        """Reads one call, or all of a list, with the end marker. Returns False if the text turns
        out to be malformed after a call has begun. Text that is no call is emitted as text."""
        ...

    def rule(
        self,
        rules: Rules,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        all_strict: bool,
    ) -> str:
        """Adds the rules of what `block` reads and returns the name of the first one. max_calls: of
        one block. all_strict: all arguments match their schemas, not only those of strict tools."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls: one row of the table.

    name: the value of --tool-parser, which is vLLM's where it has the format. aliases: other values
    of it. begin: the marker before a call or a list of calls. also_begin: other markers that models
    write in its place. inner_begin: text that begins a call without a marker before it; it is a
    part of the call. end: the marker after it. bare: an answer that begins with this character
    is a call too, if it names a tool. is_list: one marker begins several calls. is_single: an
    answer has one call at most. others: other markers that may be special tokens. between: what a
    model writes between two blocks. marks, needs, lacks: a chat template is of this format if it
    has one of the marks, all of the needs and none of the lacks. example: a call.
    families: the models that write it. make_id: makes an id of a call from its name and its number
    in the conversation. fit_ids: gives stored calls ids that the template takes.
    """

    name: str
    begin: str
    syntax: Syntax
    example: str
    families: str
    end: str = ""
    aliases: tuple[str, ...] = ()
    also_begin: tuple[str, ...] = ()
    inner_begin: tuple[str, ...] = ()
    bare: str = ""
    is_list: bool = False
    is_single: bool = False
    others: tuple[str, ...] = ()
    between: str = "\n"
    marks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    make_id: Callable[[str, int], str] = random_call_id
    fit_ids: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens and have to stay visible to the parser."""
        found = (self.begin, self.end, *self.also_begin, *self.others)
        return tuple(marker for marker in found if marker)

    @property
    def is_bare(self) -> bool:
        return bool(self.bare)

    def is_of(self, template: str) -> bool:
        """Returns whether a chat template writes calls in this format."""
        return _is_shown(template, self.marks, self.needs, self.lacks)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning: one row of the table.

    name, aliases: the values of --reasoning-parser, which are vLLM's. begin, end: the markers.
    other_begins, other_ends: other spellings of them. answer: markers around the answer after the
    reasoning, which are no part of it. families: the models that write it. after: what a model
    writes between the end of the reasoning and a call; before_content: what it writes before a
    text. others: other special tokens. marks, needs, lacks: as in ToolFormat.
    """

    name: str
    begin: str
    end: str
    families: str
    aliases: tuple[str, ...] = ()
    other_begins: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    after: str = ""
    before_content: str = ""
    others: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens and have to stay visible to the parser."""
        return (self.begin, self.end, *(self.answer or ()), *self.others)

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *self.other_begins)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.other_ends)

    def is_of(self, template: str) -> bool:
        """Returns whether a chat template has reasoning of this format."""
        return _is_shown(template, self.marks, self.needs, self.lacks)


def _is_shown(
    template: str, marks: tuple[str, ...], needs: tuple[str, ...], lacks: tuple[str, ...]
) -> bool:
    return (
        any(mark in template for mark in marks)
        and all(mark in template for mark in needs)
        and not any(mark in template for mark in lacks)
    )
