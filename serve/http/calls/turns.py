"""Builds the messages of a chat template from the pieces of a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from serve.errors import RequestError
from serve.http.edge.errors import quoted


@dataclass(slots=True)
class _Turn:
    """One message in the making. Texts are joined once, at the end: there may be thousands."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answered: dict[str, str] | None = None

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": _joined(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = _joined(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message if self.answered is None else {**message, **self.answered}


class Turns:
    """Joins consecutive texts, thoughts and tool calls of the assistant into one message.
    join_all: consecutive texts of other roles are joined as well."""

    def __init__(self, *, join_all: bool) -> None:
        self._join_all = join_all
        self._turns: list[_Turn] = []
        self._called: dict[str, str] = {}  # names of tools by call id

    def say(self, role: str, text: str) -> None:
        self._turn(role).texts.append(text)

    def think(self, text: str) -> None:
        self._turn("assistant").thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        self._called[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").calls.append(call)

    def result(self, call_id: str, text: str, where: str) -> None:
        """Adds the result of a tool call. where: the path of the call id's field. Raises
        RequestError if no earlier call has the id."""
        name = self._called.get(call_id)
        if name is None:
            raise RequestError(
                f"{where} {quoted(call_id)} does not match an earlier call",
                param=where,
            )
        answered = {"tool_call_id": call_id, "name": name}
        self._turns.append(_Turn("tool", [text], answered=answered))

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self._turns]

    def _turn(self, role: str) -> _Turn:
        """Returns the turn that a piece of this role belongs to."""
        last = self._turns[-1] if self._turns else None
        if last is None or last.role != role or not (self._join_all or role == "assistant"):
            last = _Turn(role)
            self._turns.append(last)
        return last


def _joined(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)
