"""Mistral: a list of JSON objects, or a marker before each name and each object.

    [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
    [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
    [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}
    [TOOL_CALLS]f{"x": 1}

The first one is that of the models up to tokenizer v7, the others those since v11 and of Mistral
Small 3.2 (mistralai/mistral-common, tokens/tokenizers/instruct.py; vLLM's mistral_tool_parser.py);
the last one is what vLLM's parser reads for tokenizers since v11. All are read, whichever the
template has. Ids of calls are nine letters and digits.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat
from serve.text.chat_parser.syntax.json_calls import JsonCalls
from serve.text.chat_parser.syntax.named_calls import NamedCalls
from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules
from serve.text.chat_parser.syntax.stored_calls import with_ids

_ALPHANUMERIC = string.ascii_letters + string.digits
_ID = re.compile("[A-Za-z0-9]{9}")
_LIST = JsonCalls(list="always")
_NAMED = NamedCalls(
    head=r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?",
    written_head="{name}",
    before="[ARGS]",
    has_short_form=True,
)


@dataclass(frozen=True, slots=True)
class _MistralCalls:
    """Reads all syntaxes; the grammar is that of `written`."""

    written: JsonCalls | NamedCalls

    def block(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        is_list = yield from reader.sees("[")
        return (yield from (_LIST if is_list else _NAMED).block(reader))

    def rule(
        self,
        rules: Rules,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        all_strict: bool,
    ) -> str:
        return self.written.rule(rules, tools, max_calls=max_calls, all_strict=all_strict)


def _short_id(name: str, number: int) -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _fit_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gives ids of other servers nine letters and digits, which follow from them."""
    return with_ids(messages, lambda call_id, name, number: _fitted(call_id))


def _fitted(call_id: str) -> str:
    if _ID.fullmatch(call_id):
        return call_id
    rest = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    made = []
    for _ in range(9):
        rest, digit = divmod(rest, len(_ALPHANUMERIC))
        made.append(_ALPHANUMERIC[digit])
    return "".join(made)


MISTRAL = ToolFormat(
    name="mistral",
    families="Mistral up to tokenizer v7",
    begin="[TOOL_CALLS]",
    syntax=_MistralCalls(_LIST),
    is_list=True,
    others=("[ARGS]", "[CALL_ID]"),
    make_id=_short_id,
    fit_ids=_fit_ids,
    marks=("[TOOL_CALLS]",),
    lacks=("[ARGS]",),
    example='[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    families="Mistral Small 3.2, Ministral 3, Magistral, Devstral",
    begin="[TOOL_CALLS]",
    syntax=_MistralCalls(_NAMED),
    others=("[ARGS]", "[CALL_ID]"),
    between="",
    make_id=_short_id,
    fit_ids=_fit_ids,
    marks=("[TOOL_CALLS]",),
    needs=("[ARGS]",),
    example='[TOOL_CALLS]f[ARGS]{"x": 1}',
)
REASONING = ReasoningFormat(
    name="mistral",
    families="Magistral, Ministral 3",
    begin="[THINK]",
    end="[/THINK]",
    marks=("[THINK]",),
    needs=("[/THINK]",),
)
